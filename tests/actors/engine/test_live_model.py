"""A version copied into a model's storage as on a card, with stand-ins for the CUDA runtime.

Parameters lie in host memory, registration is `fake_cudart.py`'s, and streams only note what is
asked of them. `test_engine_vllm_unpacked.py` has vLLM's models, `tests/gpu/test_engine_swap.py` a
card.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from actors.engine.weights.pinned_files import PinnedFiles
from actors.engine.wire_tensors import VersionFile
from broker.protocol.manifest import TensorSpec
from broker.weights.shared_memory import SharedFolder
from configs.errors import WeightsError
from tests.needs import needs
from tests.waiting import wait_until
from tests.weights.support.fake_cudart import FakeCudart

pytestmark = [
    pytest.mark.slow,
    needs("vLLM"),
    pytest.mark.filterwarnings("ignore"),  # vLLM and what it imports warn of themselves
]

HALF = 3
"""Columns of this worker of two."""


class Model(nn.Module):
    """A fused parameter of two tensors, columns of another, one of another type, one padded."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Parameter(torch.zeros(8, 6, dtype=torch.bfloat16))
        self.columns = nn.Parameter(torch.zeros(4, HALF, dtype=torch.bfloat16))
        self.norm = nn.Parameter(torch.zeros(6))
        self.table = nn.Parameter(torch.zeros(16, 2, dtype=torch.bfloat16))

    def load_weights(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        given = dict(tensors)
        self.fused.data[:2].copy_(given["q"])
        self.fused.data[2:].copy_(given["k"])
        self.columns.data.copy_(given["columns"].narrow(1, HALF, HALF))
        self.norm.data.copy_(given["norm"])
        self.table.data[:10].copy_(given["table"])
        self.table.data[10:].fill_(0)
        return {name for name, _ in self.named_parameters()}


SHAPES = {"q": (2, 6), "k": (6, 6), "columns": (4, 2 * HALF), "norm": (6,), "table": (10, 2)}


def specs() -> tuple[TensorSpec, ...]:
    made, offset = [], 0
    for name, shape in SHAPES.items():
        num_bytes = 2 * torch.Size(shape).numel()
        made.append(TensorSpec(name, "bfloat16", shape, offset, num_bytes))
        offset += num_bytes
    return tuple(made)


NUM_BYTES = sum(spec.num_bytes for spec in specs())


class Slot(NamedTuple):
    path: Path
    memory: mmap.mmap


class Streams:
    """Notes what is asked of streams."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.num_made = 0
        self.devices: list[torch.device] = []
        """On which a thread was."""

    def make(self, device: torch.device) -> Streams:
        assert device.type == "cuda"
        self.num_made += 1
        return self

    def wait_stream(self, other: str) -> None:
        self.asked.append(f"wait for {other}")

    def synchronize(self) -> None:
        self.asked.append("synchronize")

    @contextmanager
    def used(self, stream: Streams) -> Iterator[None]:
        assert stream is self
        self.asked.append("begin")
        yield
        self.asked.append("end")


class Copies(TorchDispatchMode):
    """Counts copies into parameters, and their bytes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._storages = {each.untyped_storage()._cdata for each in model.parameters()}
        self.num_bytes: list[int] = []
        self.waits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func is torch.ops.aten.copy_.default:
            into, _, *non_blocking = args
            if into.untyped_storage()._cdata in self._storages:
                self.num_bytes.append(into.nbytes)
                self.waits += non_blocking != [True]
        return func(*args, **(kwargs or {}))


@pytest.fixture
def cudart() -> FakeCudart:
    return FakeCudart()


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    from actors.engine.weights import live_model  # vLLM replaces some streams, and names others

    assert live_model

    streams = Streams()
    monkeypatch.setattr(torch.cuda, "Stream", streams.make)
    monkeypatch.setattr(torch.cuda, "stream", streams.used)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "the steps")
    monkeypatch.setattr(torch.cuda, "set_device", streams.devices.append)
    return streams


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch, cudart: FakeCudart, streams: Streams) -> Any:
    from actors.engine.weights import live_model

    del streams
    monkeypatch.setattr(live_model, "pinned_files", lambda _: PinnedFiles(cudart.pins()))
    monkeypatch.setattr(live_model, "set_current_vllm_config", lambda _: nullcontext())
    config: Any = None
    return live_model.LiveModel(Model(), config, torch.device("cuda:1"))


@pytest.fixture
def slot(tmp_path: Path) -> Iterator[Slot]:
    """A file and the mapping by which the learner writes it over and over."""
    with SharedFolder("live", num_bytes=NUM_BYTES, fallback=tmp_path) as folder:
        path = folder.create("slot-0", NUM_BYTES)
        with path.open("r+b") as file, mmap.mmap(file.fileno(), NUM_BYTES) as memory:
            yield Slot(path, memory)


def write(slot: Slot, seed: int) -> Model:
    """Write a version; return a model that is loaded with it."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES.items()
    }
    raw = b"".join(bytes(tensor.view(torch.uint8).numpy()) for tensor in tensors.values())
    slot.memory[:] = raw
    expected = Model()
    expected.load_weights(iter(tensors.items()))
    return expected


def place_of(path: Path) -> VersionFile:
    return VersionFile(str(path), NUM_BYTES, specs())


def prepare(live: Any, place: VersionFile) -> None:
    wait_until(lambda: live.prepare(place))


def holds(live: Any, expected: Model) -> bool:
    pairs = zip(live._model.parameters(), expected.parameters(), strict=True)
    return all(torch.equal(ours, theirs) for ours, theirs in pairs)


def test_each_version_is_its_bytes_once_and_one_wait(
    live: Any, cudart: FakeCudart, streams: Streams, slot: Slot
) -> None:
    for seed in (1, 2):
        expected = write(slot, seed)
        prepare(live, place_of(slot.path))
        assert live.way == "copied into place"
        assert set(streams.devices) == {torch.device("cuda:1")}
        assert streams.asked == [], "nothing is copied beside the steps"
        with Copies(live._model) as copies:
            live.load()

        assert holds(live, expected)
        assert len(copies.num_bytes) == len(SHAPES)
        whole = NUM_BYTES - 2 * 4 * HALF + 2 * 6  # without another's columns; norms of 4 bytes
        assert sum(copies.num_bytes) == whole
        assert copies.waits == 0
        assert streams.asked == ["wait for the steps", "begin", "end", "synchronize"]
        streams.asked.clear()
    assert (cudart.num_registered, streams.num_made) == (1, 1)


def test_a_file_that_is_cut_off_after_it_was_opened_is_opened_again(
    live: Any, cudart: FakeCudart, slot: Slot
) -> None:
    write(slot, 1)
    prepare(live, place_of(slot.path))
    os.truncate(slot.path, 0)
    os.truncate(slot.path, NUM_BYTES)
    expected = write(slot, 2)

    live.load()

    assert holds(live, expected)
    assert (cudart.num_registered, len(cudart.registered)) == (2, 1)


def test_a_file_that_takes_long_to_register_is_asked_for_again_and_awaited(
    live: Any, cudart: FakeCudart, slot: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    from threading import Event

    expected, entered, goes_on = write(slot, 1), Event(), Event()
    register = cudart.cudaHostRegister

    def slow(address: int, num_bytes: int, flags: int) -> int:
        entered.set()
        assert goes_on.wait(30)
        return int(register(address, num_bytes, flags))

    monkeypatch.setattr(cudart, "cudaHostRegister", slow)
    assert not live.prepare(place_of(slot.path))
    assert not live.prepare(place_of(slot.path))
    assert entered.wait(30)
    goes_on.set()
    live.load()

    assert holds(live, expected)
    assert cudart.num_registered == 1


def test_a_file_that_is_no_version_is_refused_and_the_next_is_not(
    live: Any, slot: Slot, tmp_path: Path
) -> None:
    expected = write(slot, 1)
    for _ in range(2):
        with pytest.raises(WeightsError, match="must be a readable file"):
            prepare(live, place_of(tmp_path / "absent"))

    prepare(live, place_of(slot.path))
    live.load()

    assert holds(live, expected)


def test_refused_registration_changes_no_bit(live: Any, cudart: FakeCudart, slot: Slot) -> None:
    cudart.refuses = True
    expected = write(slot, 1)
    prepare(live, place_of(slot.path))

    live.load()

    assert holds(live, expected)


def test_what_a_card_cannot_copy_by_itself_is_taken_there_whole() -> None:
    from actors.engine.weights.live_model import value_for_card

    whole = torch.arange(24.0).reshape(4, 6)
    into = torch.zeros(4, 2, dtype=torch.bfloat16)
    rows = whole[1:3].bfloat16()
    assert value_for_card(rows, into) is rows
    for value in (whole[:, 4:], whole[1:, 1], whole.T[:2], whole[2:]):
        taken = value_for_card(value, into)
        assert torch.equal(taken, value)
        assert taken.untyped_storage().nbytes() <= whole.nbytes
