"""Weights between a card and shared memory: registered with the driver, copied by the card itself.

`tests/weights/memory/test_host_pins.py` has all but the driver, with a stand-in.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from actors.engine.weights.pinned_files import pinned_files
from actors.engine.wire_tensors import tensors_in
from broker.weights.host_pins import HostPins
from configs.settings import LearnerSettings
from learner.weights.gather import gather
from learner.weights.layout import layout
from learner.weights.publish import _host_pins

pytestmark = pytest.mark.gpu

WIDTH, LAYERS = 8192, 4  # half a GiB in bfloat16
ROUNDS = 5


@pytest.fixture
def slot(tmp_path: Path) -> Iterator[tuple[Path, mmap.mmap]]:
    """A file in shared memory, and its mapping for the learner."""
    path = Path("/dev/shm") / f"nyala-test-{os.getpid()}"
    num_bytes = LAYERS * WIDTH * WIDTH * 2
    with path.open("x+b") as file:
        os.posix_fallocate(file.fileno(), 0, num_bytes)
        memory = mmap.mmap(file.fileno(), num_bytes)
    yield path, memory
    path.unlink()


def test_both_ends_copy_by_dma_and_the_bytes_arrive(
    slot: tuple[Path, mmap.mmap], table: list[str]
) -> None:
    path, memory = slot
    pins = _host_pins(LearnerSettings(device="cuda"))
    assert pins is not None
    layers = [nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16) for _ in range(LAYERS)]
    model = nn.Sequential(*layers).cuda()
    specs = layout(model, "bfloat16")
    pageable_s = least(lambda: gather(model, specs, memory))

    assert pins.pin(memory) == ""
    assert torch.frombuffer(memory, dtype=torch.uint8).is_pinned()
    pinned_s = least(lambda: gather(model, specs, memory))

    device = torch.device("cuda:0")
    files = pinned_files(device)
    view = files.view(path, len(memory))
    assert torch.frombuffer(view, dtype=torch.uint8).is_pinned()
    arrived = {n: t.to(device, non_blocking=True) for n, t in tensors_in(view, specs, len(memory))}
    for name, parameter in model.named_parameters():
        assert torch.equal(arrived[name], parameter)
    gib = len(memory) / 2**30
    table.append(
        f"gather of {gib:.1f} GiB into shared memory: {gib / pageable_s:.1f} GiB/s pageable, "
        f"{gib / pinned_s:.1f} GiB/s registered"
    )
    files.close()
    pins.close()
    assert not torch.frombuffer(memory, dtype=torch.uint8).is_pinned()


def test_a_refused_registration_leaves_the_card_usable(slot: tuple[Path, mmap.mmap]) -> None:
    _, memory = slot
    first, second = (_host_pins(LearnerSettings(device="cuda")) for _ in range(2))
    assert isinstance(first, HostPins) and isinstance(second, HostPins)
    assert first.pin(memory) == ""

    assert "must return 0, got 712" in second.pin(memory)

    assert int(torch.ones(3, device="cuda").sum()) == 3
    first.close()


def test_a_card_reads_what_a_file_has_that_was_cut_off_and_written_again(
    slot: tuple[Path, mmap.mmap],
) -> None:
    path, memory = slot
    device, files = torch.device("cuda:0"), pinned_files(torch.device("cuda:0"))
    for value in (1, 2, 3):
        if value == 2:
            memory[:] = bytes([2]) * len(memory)  # in place: the same pages
        else:
            path.write_bytes(bytes([value]) * len(memory))
        there = torch.frombuffer(files.view(path, len(memory)), dtype=torch.uint8)
        assert there.is_pinned()
        assert bool((there.to(device, non_blocking=True) == value).all())
    files.close()


def least(call: Callable[[], None]) -> float:
    seconds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return min(seconds)
