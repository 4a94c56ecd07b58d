"""Reading an engine's storage back: how often, and what a difference leads to."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from actors.engine.engine import StagedWeights
from actors.weights.counters import WeightCounters
from actors.weights.read_back import SHARE, StorageCheck
from buffer.record.episode import PolicyVersion
from tests.actors.support.tiny_model import make_model, stage


class Storage:
    """Takes its time to be read, and holds what a test wants; the real ones are in tests/actors."""

    def __init__(self) -> None:
        self.now = 100.0
        self.takes_s = 0.2
        self.readings = 0
        self.stale: list[str] | None = []

    def clock(self) -> float:
        return self.now

    async def read_back(self, _: StagedWeights) -> list[str] | None:
        self.now += self.takes_s
        self.readings += 1
        return self.stale


@pytest.fixture
def storage() -> Storage:
    return Storage()


@pytest.fixture
def check(storage) -> StorageCheck:
    return StorageCheck(storage, WeightCounters(), clock=storage.clock)


@pytest.fixture(scope="module")
def staged(tmp_path_factory) -> StagedWeights:
    return stage(make_model(), tmp_path_factory.mktemp("staged") / "file", PolicyVersion(0, 7))


def fault(check: StorageCheck, staged: StagedWeights, *, is_again: bool = False) -> str:
    return asyncio.run(check.fault(staged, is_again=is_again))


@pytest.mark.parametrize("between_s", [0.1, 1.0, 30.0])
def test_readings_take_a_hundredth_of_the_time(check, storage, staged, between_s) -> None:
    begun = storage.now

    async def live() -> int:
        count = 0
        while storage.now < begun + 1000:
            assert await check.fault(staged, is_again=False) == ""
            storage.now += between_s
            count += 1
        return count

    swaps = asyncio.run(live())
    share = storage.readings * storage.takes_s / (storage.now - begun)
    assert share <= 1.05 * SHARE
    assert storage.readings == swaps if between_s > 20 else share > 0.9 * SHARE


def test_after_a_wrong_version_the_next_is_read_at_once(check, storage, staged) -> None:
    fault(check, staged)
    fault(check, staged)
    assert storage.readings == 1

    storage.stale = ["a", "b", "c", "d"]

    assert "other values of weights (0, 7) than it was given, in ['a', 'b', 'c'] (4 in all)" in (
        fault(check, staged, is_again=True)
    )
    assert check._counters.storage_mismatches == 1


def test_storage_that_cannot_be_read_is_not_asked_again(check, storage, staged) -> None:
    storage.stale = None

    assert [fault(check, staged, is_again=True) for _ in range(3)] == [""] * 3
    assert storage.readings == 1
    assert check._counters.read_backs == 0


def test_a_file_that_changed_after_the_swap_is_found(check, staged, tmp_path: Path) -> None:
    changed = bytearray(staged.path.read_bytes())
    changed[-1] ^= 1
    path = tmp_path / "changed"
    path.write_bytes(changed)

    found = fault(check, StagedWeights(path, staged.manifest))

    assert "(0, 7) has another checksum after the swap than before" in found


def test_a_version_that_was_overwritten_while_it_was_compared_shows_nothing(
    check, storage, staged
) -> None:
    storage.stale = ["a"]

    assert fault(check, StagedWeights(staged.path, staged.manifest, lambda: False)) == ""
    assert check._counters.storage_mismatches == 0


def test_a_file_that_is_gone_shows_nothing(check, staged, tmp_path: Path) -> None:
    assert fault(check, StagedWeights(tmp_path / "absent", staged.manifest)) == ""
