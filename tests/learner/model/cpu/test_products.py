"""Products by oneDNN: same map and gradients, the same bits again, and where they are chosen."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from learner.model import cpu
from learner.model.cpu import LinearMap, choose_products

needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN"
)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor where oneDNN is faster."""
    monkeypatch.setattr(cpu, "is_faster", lambda: True)


@needs_onednn
@pytest.mark.parametrize(("inputs", "outputs"), [(24, 40), (40, 24)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_outputs_and_gradients_are_those_of_float64(
    inputs: int, outputs: int, has_bias: bool
) -> None:
    torch.manual_seed(0)
    shapes = [(2, 7, inputs), (outputs, inputs), *([(outputs,)] if has_bias else [])]
    narrow = [torch.randn(shape, requires_grad=True) for shape in shapes]
    wide = [each.detach().double().requires_grad_() for each in narrow]
    slopes = torch.randn(2, 7, outputs)

    found = LinearMap.apply(*narrow, *([] if has_bias else [None]))
    expected = nn.functional.linear(*wide)
    found.backward(slopes)
    expected.backward(slopes.double())

    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(narrow, wide, strict=True):
        assert ours.grad is not None and theirs.grad is not None
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-5, atol=1e-5)


@needs_onednn
def test_the_same_matrices_give_the_same_bits_after_other_numbers_of_rows() -> None:
    torch.manual_seed(0)
    weight, inputs = torch.randn(33, 48), torch.randn(131, 48)

    first = cpu.multiply(inputs, weight)
    for rows in (1, 5, 130):
        cpu.multiply(inputs[:rows], weight)

    assert torch.equal(first, cpu.multiply(inputs, weight))


@needs_onednn
def test_a_frozen_weight_costs_no_product_and_passes_a_gradient_on(
    chosen: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiply = Mock(wraps=cpu.multiply)
    monkeypatch.setattr(cpu, "multiply", multiply)
    layer = nn.Linear(6, 5).requires_grad_(requires_grad=False)
    choose_products([layer], "cpu")
    inputs = torch.randn(3, 6, requires_grad=True)

    layer(inputs).sum().backward()

    assert multiply.call_count == 2
    torch.testing.assert_close(inputs.grad, layer.weight.sum(0).expand(3, 6))


@needs_onednn
def test_other_kinds_of_numbers_and_no_rows_are_left_to_torch(
    chosen: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("oneDNN was asked")

    monkeypatch.setattr(cpu, "multiply", refuse)
    wide, narrow = nn.Linear(4, 3).double(), nn.Linear(4, 3)
    choose_products([wide, narrow], "cpu")

    assert wide(torch.zeros(2, 4, dtype=torch.float64)).dtype == torch.float64
    assert narrow(torch.zeros(0, 4)).shape == (0, 3)
    with pytest.raises(AssertionError, match="was asked"):
        narrow(torch.zeros(2, 4))


def test_a_layer_on_a_card_or_of_another_kind_keeps_its_forward(chosen: None) -> None:
    class Own(nn.Linear):
        pass

    on_card, own = nn.Linear(2, 2), Own(2, 2)

    choose_products([on_card], "cuda")
    choose_products([own], "cpu")

    assert "forward" not in vars(on_card) | vars(own)


@pytest.mark.parametrize(
    ("vendor", "capability", "expected"),
    [
        ("AuthenticAMD", "AVX512", True),
        ("AuthenticAMD", "AVX2", False),
        ("GenuineIntel", "AVX512", False),
    ],
)
def test_mkl_is_left_where_it_has_no_avx_512(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    vendor: str,
    capability: str,
    expected: bool,
) -> None:
    cpu_info = tmp_path / "cpuinfo"
    cpu_info.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\n", encoding="utf-8")
    monkeypatch.setattr(cpu, "CPU_INFO", cpu_info)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)

    assert cpu.is_faster.__wrapped__() is expected
