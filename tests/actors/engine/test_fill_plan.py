"""The plan of a fill is found by watching a loader, and only where it does the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from actors.engine.shadow.plan import BASE, make_plan
from broker.protocol.manifest import TensorSpec


class Fused(nn.Module):
    """One parameter of two tensors, one of one, and padding that nothing is loaded into."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = nn.Parameter(torch.ones(5, 3))
        self.norm = nn.Parameter(torch.ones(4))
        self.padded = nn.Parameter(torch.ones(6, 2))


def spec(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, "float32", shape, 0, 0)


SPECS = (spec("q", 2, 3), spec("k", 3, 3), spec("norm", 4), spec("table", 4, 2))


def load(model, tensors) -> None:
    places = {
        "q": model.qk[:2],
        "k": model.qk[2:],
        "norm": model.norm,
        "table": model.padded[:4],
    }
    for name, tensor in tensors:
        places[name].data.copy_(tensor)


def load_transposed(model, tensors) -> None:
    load(model, ((name, tensor.flip(0)) for name, tensor in tensors))


def load_by_columns(model, tensors) -> None:
    given = dict(tensors)
    load(model, given.items())
    model.padded.data[:4, 1] = given["norm"]


def test_a_plan_puts_every_tensor_where_the_loader_does() -> None:
    plan = make_plan(Fused(), SPECS, load)
    tensors = {each.name: torch.randn(each.shape) for each in SPECS}
    model = Fused()
    load(model, tensors.items())

    assert plan is not None
    ours = Fused()
    for name, parameter in ours.named_parameters():
        plan.copy(name, tensors, parameter.data)
    for name in ("qk", "norm", "padded"):
        assert torch.equal(getattr(ours, name), getattr(model, name))
    assert torch.equal(plan.whole("qk", tensors), model.qk)
    assert plan.whole("norm", tensors) is tensors["norm"]


@pytest.mark.parametrize("loader", [load_transposed, load_by_columns])
def test_there_is_no_plan_where_a_tensor_does_not_become_rows(loader) -> None:
    assert make_plan(Fused(), SPECS, loader) is None


def test_tensors_beyond_the_first_digit_are_told_apart() -> None:
    count = 2 * BASE + 3
    specs = tuple(spec(f"t{n}", 1, 2) for n in range(count))
    model = nn.Linear(2, count, bias=False)

    def rows(into, tensors) -> None:
        for name, tensor in tensors:
            into.weight.data[int(name[1:])] = tensor[0]

    plan = make_plan(model, specs, rows)

    assert plan is not None
    names = [each.name for each in specs]
    parts = plan.parts("weight", {name: torch.zeros(1) for name in names})
    assert [place.tensor for place, _ in parts] == names
