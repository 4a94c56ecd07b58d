"""The judges of an endurance run: slopes over lives that end, and what outlives a run."""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock
from uuid import uuid4

import pytest

from buffer.operations.values import DeadLetter
from configs.errors import StoreError
from lab.endurance.endurance import EnduranceResult, resume_if_paused, spoilt_by_others
from lab.endurance.growth import (
    SHARED,
    WARM_UP_S,
    Line,
    ResourceCounts,
    ResourceSampler,
    RoleGrowth,
    count_resources,
    orphaned_entries,
    processes_of,
    slope_per_min,
)
from tests.waiting import wait_until

BALLAST_MB = 32  # in new pages: a heap may have old ones to give


def life(begin_s: float, minutes: float, *, level: float, per_min: float) -> Line:
    """A process that grows by a fixed amount a minute, and fast while it warms up."""
    line = []
    for second in range(0, int(60 * minutes), 5):
        warming = 10_000.0 * min(second / WARM_UP_S, 1.0)
        line.append((begin_s + second, level + warming + per_min * second / 60))
    return line


def test_a_slope_is_that_within_lives_whatever_their_levels_and_beginnings() -> None:
    lives = [
        life(0, 6, level=300_000, per_min=50),
        life(360, 9, level=200_000, per_min=50),
        life(900, 1, level=0, per_min=9_000),  # never warm
    ]

    assert slope_per_min(lives) == pytest.approx(50)
    assert slope_per_min([life(0, 4, level=0, per_min=50)]) is None


def test_memory_and_descriptors_of_a_process_are_followed() -> None:
    growth = ResourceSampler(lambda: {os.getpid(): "tests", 2**22 + 1: "nobody"})
    growth.sample(0.0)
    held = [socket.socket() for _ in range(5)]
    with closing(mmap.mmap(-1, BALLAST_MB * 2**20)) as ballast:
        ballast.write(b"x" * len(ballast))
        growth.sample(60.0)
    for one in held:
        one.close()

    [role] = growth.by_role()

    assert role.lives == 1
    assert role.descriptors[1] - role.descriptors[0] == 5
    assert role.rss_mb[1] - role.rss_mb[0] > 0.8 * BALLAST_MB
    assert role.kb_per_min is None


@pytest.fixture
def entry() -> Iterator[Path]:
    """A file in shared memory that nobody uses."""
    path = SHARED / f"nyala-test-{uuid4().hex}"
    path.write_bytes(b"x" * 4096)
    yield path
    path.unlink()


def test_an_entry_of_shared_memory_is_orphaned_when_nobody_uses_it(entry: Path) -> None:
    before = {path.name for path in SHARED.iterdir()} - {entry.name}

    assert entry.name in orphaned_entries(before)
    with entry.open("r+b") as file, closing(mmap.mmap(file.fileno(), 4096)):
        assert entry.name not in orphaned_entries(before)
        assert count_resources([os.getpid()]).shared >= 1


def test_a_folder_of_shared_memory_is_another_runs_while_somebody_has_a_file_of_it_open() -> None:
    before = {path.name for path in SHARED.iterdir()}
    with tempfile.TemporaryDirectory(prefix="nyala-test-", dir=SHARED) as folder:
        with Path(folder, "alive").open("w"):
            assert Path(folder).name not in orphaned_entries(before)

        assert Path(folder).name in orphaned_entries(before)


def test_listening_ports_of_processes_are_counted() -> None:
    before = count_resources([os.getpid()])
    with closing(socket.create_server(("127.0.0.1", 0))):
        assert count_resources([os.getpid()]).ports == before.ports + 1


def test_a_process_that_outlives_its_run_is_found(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()", str(tmp_path)], stdin=-1) as process:
        try:
            # its command line comes a moment after its start
            wait_until(lambda: processes_of(tmp_path) == [process.pid])
        finally:
            process.kill()
    assert processes_of(tmp_path) == []


def role(kb_per_min: float | None, per_min: float | None) -> RoleGrowth:
    return RoleGrowth("broker", 1, 60.0, (1, 1, 1), kb_per_min, (1, 1, 1), per_min)


@pytest.mark.parametrize(
    ("endured", "problem"),
    [
        (
            EnduranceResult(tasks={"created": 3, "committed": 2}),
            "3 tasks were created, 2 are there",
        ),
        (EnduranceResult(roles=[role(9e3, 0.0)]), "broker grows"),
        (EnduranceResult(roles=[role(None, 2.0)]), "broker grows"),
        (EnduranceResult(left=["process 7 is left"]), "process 7 is left"),
        (
            EnduranceResult(first=ResourceCounts(9, 4, 0), last=ResourceCounts(9, 8, 0)),
            "4 ports at first, 8 at last",
        ),
    ],
)
def test_what_is_lost_or_grows_or_is_left_is_a_problem(
    endured: EnduranceResult, problem: str
) -> None:
    endured.judge()

    assert endured.problems == [problem]
    assert not endured.holds
    assert problem in endured.markdown()


def test_a_run_that_lost_nothing_and_did_not_grow_holds() -> None:
    endured = EnduranceResult(
        tasks={"created": 3, "committed": 2, "ready": 1},
        roles=[role(3.0, -0.1), role(None, None)],
        first=ResourceCounts(9, 4, 0),
        last=ResourceCounts(8, 4, 1),
    )

    endured.judge()

    assert endured.holds


def test_only_what_the_liar_was_granted_may_die() -> None:
    letters = [DeadLetter(task, 0, "timeout", 3, 0) for task in (4, 5)]

    assert spoilt_by_others(letters, {4, 5}) == []
    assert spoilt_by_others(letters, {4}) == ["task 5 died, which the liar never had: timeout"]


def test_a_paused_run_is_resumed_and_the_pause_is_a_problem() -> None:
    """What an operator does, so that the rest of the hour shows something."""
    answers: list[Any] = [
        SimpleNamespace(paused=""),
        SimpleNamespace(paused="11 tasks died"),
        True,
        StoreError("Redis is away"),
    ]
    run: Any = SimpleNamespace(store=Mock(run=Mock(side_effect=answers)))

    found = [resume_if_paused(run) for _ in range(3)]

    assert found == [[], ["leasing was paused: 11 tasks died"], []]
    assert run.store.run.call_count == len(answers)
