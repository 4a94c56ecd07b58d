"""The plan of a fill is found by watching a loader, and only where it does the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from actors.engine.weights.fill_plan import make_plan
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


def load_shard(model, tensors) -> None:
    """As the second of two workers with tensor parallelism: half of the columns of each matrix."""
    shards = ((name, t.chunk(2, 1)[1] if t.ndim > 1 else t) for name, t in tensors)
    load(model, shards)


def load_scaled(model, tensors) -> None:
    load(model, ((name, tensor * 2) for name, tensor in tensors))


def load_a_number(model, tensors) -> None:
    given = dict(tensors)
    load(model, given.items())
    model.norm.data.fill_(given["norm"][0].item())


def load_a_part(model, tensors) -> None:
    load(model, [(name, tensor) for name, tensor in tensors if name != "k"])


def load_twice(model, tensors) -> None:
    given = dict(tensors)
    load(model, given.items())
    model.qk.data[1:3].copy_(given["q"])


class Sharded(Fused):
    """Of the same tensors, half of the columns."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = nn.Parameter(torch.ones(5, 1))
        self.padded = nn.Parameter(torch.ones(6, 1))


@pytest.mark.parametrize(
    ("kind", "loader", "specs"),
    [(Fused, load, SPECS), (Sharded, load_shard, (*SPECS[2:], spec("q", 2, 2), spec("k", 3, 2)))],
)
def test_a_plan_puts_every_part_where_the_loader_does(kind, loader, specs) -> None:
    plan = make_plan(kind(), specs, loader)
    tensors = {each.name: torch.randn(each.shape) for each in specs}
    model = kind()
    loader(model, tensors.items())

    assert plan is not None
    ours = kind()
    for name, parameter in ours.named_parameters():
        plan.copy(name, tensors, parameter.data)
    for name in ("qk", "norm", "padded"):
        assert torch.equal(getattr(ours, name), getattr(model, name))
    assert torch.equal(plan.whole("qk", tensors), model.qk)
    assert plan.whole("norm", tensors).data_ptr() == tensors["norm"].data_ptr()
    assert torch.equal(plan.whole("padded", tensors)[:4], model.padded[:4])
    assert not plan.whole("padded", tensors)[4:].any()


def test_there_is_no_plan_for_a_version_without_a_parameter() -> None:
    assert make_plan(Fused(), [each for each in SPECS if each.name != "norm"], load) is None


def test_to_make_a_plan_changes_no_weight() -> None:
    model = Fused()

    make_plan(model, SPECS, load)

    assert all(bool((parameter == 1).all()) for parameter in model.parameters())


@pytest.mark.parametrize("loader", [load_scaled, load_a_number, load_a_part, load_twice])
def test_there_is_no_plan_where_a_loader_does_more_than_copy_parts(loader) -> None:
    assert make_plan(Fused(), SPECS, loader) is None
