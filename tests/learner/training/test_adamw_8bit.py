"""Moments as codes: how near they are, in which blocks, and where a step would be divided by 0."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from learner.training.adamw_8bit import AdamW8bit, decode, encode, levels

CPU = torch.device("cpu")


def _there_and_back(values_RC: Tensor, *, signed: bool) -> Tensor:
    rows, columns = values_RC.shape
    codes_RC = torch.empty(rows, columns, dtype=torch.uint8)
    scales_RN = torch.empty(rows, -(-columns // 256))
    encode(values_RC, codes_RC, scales_RN, levels(CPU, signed=signed))
    return decode(codes_RC, scales_RN, levels(CPU, signed=signed))


@pytest.mark.parametrize("signed", [True, False])
def test_levels_are_the_256_of_the_dynamic_tree(*, signed: bool) -> None:
    found = levels(CPU, signed=signed)

    assert len(found.unique()) == 256 and bool((found.diff() > 0).all())
    assert found[-1] == 1 and 0 in found
    smallest = found[found > 0][0]
    assert smallest == pytest.approx(5.5e-7 if signed else 3.25e-7, rel=1e-6)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("columns", [1, 256, 300])
def test_a_moment_is_kept_to_a_part_of_its_decade(columns: int, *, signed: bool) -> None:
    torch.manual_seed(0)
    values = (
        10 ** (-5 * torch.rand(7, columns)) * torch.tensor([1e-9, 1e-3, 1, 10, 1e5, 1, 1])[:, None]
    )
    if signed:
        values *= torch.randn(7, columns).sign()

    kept = _there_and_back(values, signed=signed)

    largest = torch.stack([each.abs().amax(-1) for each in values.split(256, dim=1)], dim=1)
    scale = largest.repeat_interleave(256, dim=1)[:, :columns]
    error = (kept - values).abs()
    assert bool((error <= 0.01 * scale).all()), "of the block's largest"
    assert float((error / values.abs()).max()) < 0.5, "of the smallest, five decades below"


def test_a_block_does_not_reach_beyond_its_row() -> None:
    values = torch.ones(2, 300)
    values[0], values[1, 256:] = 1e6, 1e-6

    assert torch.equal(_there_and_back(values, signed=True), values)


def test_no_root_is_rounded_to_zero_and_no_moment_of_nothing_appears() -> None:
    values = torch.tensor([[1.0, 1e-12, 0.0], [0.0, 0.0, 0.0]])

    kept = _there_and_back(values, signed=False)

    assert 0 < kept[0, 1] < 1e-6, "a step is divided by it"
    assert not kept[1].any()


def test_pieces_of_rows_are_stepped_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    gradients = [torch.randn(9, 300) for _ in range(3)]
    found = []
    for piece in (2**21, 600):
        monkeypatch.setattr("learner.training.adamw_8bit.PIECE", piece)
        weight = nn.Parameter(torch.ones(9, 300))
        optimizer = AdamW8bit([weight], lr=0.1, betas=(0.9, 0.99), weight_decay=0.1)
        for gradient in gradients:
            weight.grad = gradient.clone()
            optimizer.step()
        found.append(weight.detach())

    assert torch.equal(*found)


def test_weights_decay_apart_from_the_gradient() -> None:
    weight = nn.Parameter(torch.full((2, 3), 4.0))
    optimizer = AdamW8bit([weight], lr=0.5, betas=(0.9, 0.99), weight_decay=0.1)
    weight.grad = torch.zeros(2, 3)

    optimizer.step()

    assert torch.allclose(weight, torch.full((2, 3), 3.8))
