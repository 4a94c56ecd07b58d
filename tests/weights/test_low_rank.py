"""Adapters on the wire: the same bits from the same base, offered, pulled and checked."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from torch import nn

from broker.protocol.manifest import BASE, AdapterSpec, TensorSpec, WeightManifest, digest_of
from broker.protocol.weight_messages import Announce, Pull, WeightChunk
from broker.weights.low_rank import add_low_rank, apply_adapter, round_by_place
from buffer.record.episode import PolicyVersion
from configs.errors import WeightsError
from learner.weights.gather import adapted_weights, gather_adapter
from learner.weights.layout import layout
from tests.learner.support.adapted_policy import published_bytes
from tests.weights.support.adapted_toy import SCALE, AdaptedToy
from tests.weights.support.plane import Plane
from tests.weights.support.scripted_publisher import ScriptedPublisher, manifest, play

DTYPES = ("float32", "bfloat16")


def _round(model: nn.Module, dtype: str) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.requires_grad:
                parameter.copy_(parameter.to(getattr(torch, dtype)))


def _manifest(model: nn.Module, dtype: str) -> tuple[WeightManifest, bytes, bytes]:
    """A version of a model, its adapter and the bytes of the base."""
    base = published_bytes(model, dtype, is_merged=False)
    spec, adapter = gather_adapter(model, digest_of([base]), adapted_weights(model))
    specs = layout(model, dtype)
    whole = structs.replace(
        manifest(1),
        digest=digest_of([published_bytes(model, dtype)]),
        num_bytes=len(base),
        tensors=specs,
        adapter=spec,
    )
    return whole, adapter, base


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_actor_merges_the_bits_that_the_learner_publishes(dtype: str) -> None:
    model = AdaptedToy()
    model.step(7)
    _round(model, dtype)
    version, adapter, base = _manifest(model, dtype)
    memory = bytearray(base)

    apply_adapter(adapter, memory, version)

    assert memory != base
    assert digest_of([memory]) == version.digest
    assert version.adapter is not None and len(adapter) == version.adapter.num_bytes == 4 * 2 * 32


@pytest.mark.parametrize("wrong", ["scale forgotten", "A and B exchanged", "of another base"])
def test_another_product_has_another_digest(wrong: str) -> None:
    model = AdaptedToy()
    model.step(7)
    version, adapter, base = _manifest(model, "float32")
    spec = version.adapter
    assert spec is not None
    memory = bytearray(base)
    if wrong == "scale forgotten":
        version = structs.replace(version, adapter=structs.replace(spec, scale=1.0))
    elif wrong == "A and B exchanged":
        adapter = adapter[len(adapter) // 2 :] + adapter[: len(adapter) // 2]
    else:
        memory[-1] ^= 1

    apply_adapter(adapter, memory, version)

    assert digest_of([memory]) != version.digest


@pytest.mark.parametrize("change", [0.02, -0.02, 0.5, 0.9, 3.3])
def test_all_of_a_small_change_arrives_in_bfloat16(change: float) -> None:
    """The change is in steps of the grid; the nearest value loses those below a half."""
    step, size = 2.0**-7, 1024
    weight = torch.linspace(1.1, 1.8, size**2).bfloat16().view(size, size)
    spec = TensorSpec("w", "bfloat16", (size, size), 0, 2 * size**2)
    adapter = AdapterSpec("", 1, 1.0, 4 * 2 * size, (0,))
    version = structs.replace(manifest(1), tensors=(spec,), adapter=adapter)
    memory = bytearray(weight.view(torch.uint8).numpy().tobytes())
    a, b = torch.ones(size), torch.full((size,), change * step)

    apply_adapter(a.numpy().tobytes() + b.numpy().tobytes(), memory, version)

    found = torch.frombuffer(memory, dtype=torch.bfloat16).view(size, size).float()
    moved = (found - weight.float()) / step
    low = math.floor(change)
    assert set(moved.unique().tolist()) == {low, low + 1}
    assert float(moved.mean()) / change == pytest.approx(1, abs=0.03)
    for part in (moved[:256], moved[:, ::3], moved[::2, 1::2]):
        assert float(part.mean()) / change == pytest.approx(1, abs=0.08)


def test_a_value_on_the_grid_stays_and_one_that_went_up_stays_up() -> None:
    places = np.arange(64, dtype="<i4")
    weight = torch.linspace(1.1, 1.8, 64 * 64).bfloat16().float().view(64, 64).numpy()

    def rounded(change: float) -> Any:
        found = weight + np.float32(change * 2.0**-7)
        round_by_place(found.view("<i4"), places, places)
        return found

    assert rounded(0.0).tobytes() == weight.tobytes()
    series = [rounded(change) for change in (0.1, 0.4, 0.7, 1.0)]
    assert all((a <= b).all() for a, b in itertools.pairwise(series))


def test_rows_are_rounded_alike_by_any_library_in_any_part() -> None:
    generator = np.random.default_rng(3)
    values = generator.normal(size=(37, 50)).astype("f4")
    rows, columns = np.arange(37, dtype="<i4"), np.arange(50, dtype="<i4")
    found = []
    for block in (1, 300, 2**20):
        ours, theirs = values.copy(), torch.from_numpy(values.copy())
        round_by_place(ours.view("<i4"), rows, columns, block=block)
        for part in (slice(0, 20), slice(20, 37)):
            places = torch.from_numpy(rows[part]), torch.from_numpy(columns)
            round_by_place(theirs[part].view(torch.int32), *places, block=block)
        found += [ours, theirs.numpy()]

    assert all(each.tobytes() == found[0].tobytes() for each in found)
    assert np.array_equal(torch.from_numpy(found[0]).bfloat16().float().numpy(), found[0])


def test_the_product_does_not_depend_on_the_library_or_the_block() -> None:
    generator = np.random.default_rng(3)
    weight, b, a = (generator.normal(size=s).astype("f4") for s in ((37, 50), (37, 7), (7, 50)))
    found = []
    for block in (1, 300, 2**20):
        ours, theirs = weight.copy(), torch.from_numpy(weight.copy())
        add_low_rank(ours, b, a, scale=SCALE, block=block)
        add_low_rank(theirs, torch.from_numpy(b), torch.from_numpy(a), scale=SCALE, block=block)
        found += [ours, theirs.numpy()]

    np.testing.assert_allclose(found[0], weight + SCALE * b @ a, rtol=1e-4, atol=1e-5)
    assert all(each.tobytes() == found[0].tobytes() for each in found)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"tensors": (9,)}, "for number 9 of 4 with shape"),
        ({"tensors": (3,)}, r"for number 3 of 4 with shape \(16,\)"),
        ({"rank": 0}, "got rank 0 for number 2 of 4"),
        ({"rank": 3}, "must have 96 numbers, got 64"),
        ({"tensors": ()}, "must have 0 numbers, got 64"),
    ],
)
def test_an_adapter_of_another_layout_is_refused(changes: dict[str, Any], text: str) -> None:
    version, adapter, base = _manifest(AdaptedToy(), "float32")
    assert version.adapter is not None
    wrong = structs.replace(version, adapter=structs.replace(version.adapter, **changes))
    memory = bytearray(base)

    with pytest.raises(WeightsError, match=text):
        apply_adapter(adapter, memory, wrong)

    assert memory == base


class AdapterPublisher(ScriptedPublisher):
    """A publisher of versions with adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.model = AdaptedToy()
        self.versions: dict[int, tuple[bytes, bytes]] = {}
        """Step -> adapter, and all bytes."""
        self.kinds: list[str] = []
        """What was asked for."""
        self.spoilt: set[str] = set()

    def announce(self, step: int) -> Announce:
        self.model.step(step)
        version, adapter, _ = _manifest(self.model, "float32")
        self.versions[step] = adapter, published_bytes(self.model)
        return Announce(structs.replace(version, version=PolicyVersion(1, step)), 0)

    def _reply(self, pull: Pull) -> None:
        if pull.version == BASE:
            kind, whole = "base", published_bytes(self.model, is_merged=False)
        else:
            kind = "all bytes" if pull.base is None else "adapter"
            whole = self.versions[pull.version.step][kind == "all bytes"]
        payload = bytearray(whole[pull.offset : pull.offset + pull.num_bytes])
        if kind in self.spoilt:
            payload[3] ^= 1
        self.kinds.append(kind)
        self.answer(WeightChunk(pull.version, pull.offset, bytes(payload), pull.base))


@pytest.mark.parametrize(
    ("spoilt", "kinds"),
    [
        (None, ["base", "adapter", "adapter"]),
        ("base", ["base", "all bytes", "all bytes"]),
        ("adapter", ["base", "adapter", "all bytes", "all bytes"]),
    ],
)
def test_actors_pull_the_base_once_then_adapters_and_all_bytes_where_these_are_wrong(
    tmp_path: Path, spoilt: str | None, kinds: list[str]
) -> None:
    publisher = AdapterPublisher()
    publisher.spoilt = {spoilt} if spoilt else set()

    async def story(stage: Any) -> None:
        for step in (1, 2):
            stage.arrived.clear()
            stage.transfer.on_message(publisher.announce(step))
            await stage.arrived.wait()

    stage = play(publisher, tmp_path, story)

    assert publisher.kinds == kinds
    assert stage.bytes == [publisher.versions[step][1] for step in (1, 2)]
    assert stage.transfer.counters.pulls == 2
    assert stage.transfer.counters.adapter_pulls == (0 if spoilt else 2)
    assert stage.transfer.counters.digest_mismatches == (1 if spoilt else 0)


@pytest.mark.slow
def test_actors_follow_a_publisher_by_adapters(tmp_path: Path) -> None:
    model = AdaptedToy(ballast=200_000)
    plane = Plane(tmp_path, model=model, broadcast=False)
    try:
        plane.publish()
        actor = plane.actor("follower")
        actor.wait("synced", timeout_s=60.0)
        for _ in range(2):
            manifest = plane.publish()
            assert actor.applied(manifest)["digest"] == manifest.digest
        counters = actor.counters()
        found = plane.deliveries(until=manifest.version)
    finally:
        plane.close()

    assert (counters["pulls"], counters["adapter_pulls"]) == (3, 3)
    assert counters["digest_mismatches"] == 0
    assert counters["pulled_bytes"] == manifest.num_bytes + 3 * 256
    assert [sent.adapter_bytes for sent in found] == [256] * 3
