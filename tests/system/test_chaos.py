"""The fault matrix: a short one on a live run, and the judges that it relies on."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from buffer.operations.values import TaskSeen
from configs.errors import SettingsError
from lab import matrix
from lab.command import chosen
from lab.fault_case import Fault, FaultCase, FaultResult, results_as_markdown
from lab.faults.proxy import Proxy
from lab.live_run import ExpectationFailed
from lab.matrix import FAULTS, Plan, history_violations, oldest_lag, run_matrix
from lab.pair_case import draw_pairs
from lab.task_trace import Observer, TaskTrace

SHORT = ("actor-kill", "broker-kill", "redis-rewind")
"""And a pair of two of them at once."""
WAIT_S = 5.0


@pytest.mark.live
@pytest.mark.timeout(600)
def test_a_live_run_comes_back_from_faults_with_nothing_lost_or_repeated(tmp_path: Path) -> None:
    [pair] = [fault for fault in draw_pairs(0, 27) if "broker-kill.redis-rewind" in fault.name]
    faults = (*chosen(SHORT), replace(pair, place=None))  # on the same run: no clock jumps in it
    plan = Plan(tmp_path / "chaos", faults=faults, num_actors=2)

    rows = run_matrix(plan, lambda *_: None)

    names = [fault.name for fault in faults]
    assert [row.name for row in rows] == names
    for row in rows:
        assert row.holds and row.skipped is None, row
        assert row.recovered_s is not None
    killed, broker, _, both = rows
    assert "of its log lost" in both.remark
    assert killed.tasks > 0
    assert killed.tokens_kept is not None and killed.tokens_kept > 0
    assert broker.charged == 0
    written = json.loads((plan.folder / "faults.json").read_text())
    assert [line["name"] for line in written] == names
    assert (plan.folder / "faults.md").read_text() == results_as_markdown(rows)


@pytest.mark.parametrize(
    "error", [ExpectationFailed("it must train"), ProcessLookupError("no such process")]
)
def test_a_fault_that_raises_costs_its_own_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The victim of a fault may have died just before."""

    def act(_: FaultCase) -> None:
        raise error

    monkeypatch.setattr(matrix, "live_run", lambda *_: nullcontext(Mock(place=None)))
    monkeypatch.setattr(FaultCase, "settle", lambda _: None)
    monkeypatch.setattr(matrix, "trained_batches", lambda _: {})
    plan = Plan(tmp_path / "chaos", faults=(Fault("a", "a", act), Fault("b", "b", act)))

    rows = run_matrix(plan, lambda *_: None)

    assert [row.holds for row in rows] == [False, False]
    assert all(str(error) in row.cells()[-1] for row in rows)


def test_names_of_faults_are_unique_and_an_unknown_one_is_refused() -> None:
    names = [fault.name for fault in FAULTS]

    assert len(set(names)) == len(names)
    with pytest.raises(SettingsError, match=r"--only must be the name of a fault, got 'fire'"):
        chosen(["fire"])


@pytest.mark.parametrize(
    ("batches", "invariant"),
    [
        ([(1, [1, 2]), (2, [2, 3])], "I5"),
        ([(1, [1, 2]), (3, [3, 4])], "I6"),
        ([(1, [1, 9]), (2, [3, 4])], "I7"),
    ],
)
def test_a_history_that_breaks_a_rule_is_named(
    batches: list[tuple[int, list[int]]], invariant: str
) -> None:
    rows: list[dict[str, object]] = [{"step": k, "group_ids": ids} for k, ids in batches]

    found = history_violations(rows, {1: frozenset({1, 2})})

    assert [text[:2] for text in found] == [invariant]


def test_a_sound_history_breaks_no_rule() -> None:
    rows: list[dict[str, object]] = [
        {"step": 1, "group_ids": [2, 1]},
        {"step": 2, "group_ids": [3]},
    ]

    assert history_violations(rows, {1: frozenset({1, 2})}) == []


def test_only_batches_that_a_dead_learner_had_sealed_may_have_older_tokens() -> None:
    rows: list[dict[str, object]] = [
        {"step": 3, "policy_lag_max": 2, "is_replay": False},
        {"step": 4, "policy_lag_max": 4, "is_replay": True},
    ]

    assert oldest_lag(rows) == 2
    assert oldest_lag([*rows, {"step": 5, "policy_lag_max": 3, "is_replay": False}]) == 3


def seen(length: int, *, fence: int = 7, state: str = "L", attempts: int = 0) -> TaskSeen:
    return TaskSeen(1, state, fence, "actor", length, attempts)


def test_kept_tokens_are_those_that_the_next_holder_began_with() -> None:
    observer = Observer(snapshot_s=1.0)
    for second in range(5):  # ten tokens a second, all of them sent
        observer.note([seen(10 * second)], float(second))
    trace = TaskTrace.from_tasks([seen(40)], observer, 5.0)

    trace.note_open({1: seen(40, state="R", attempts=1)}, 6.0)
    trace.note_open({1: seen(45, fence=8, attempts=1)}, 7.0)

    assert trace.kept_share == pytest.approx(40 / 50), "the last second was not sent"
    assert trace.charged == 1
    assert trace.open_ids == []


def test_a_holder_that_leaves_in_order_stores_what_it_has_made() -> None:
    observer = Observer(snapshot_s=1.0)
    for second in range(5):
        observer.note([seen(10 * second)], float(second))
    trace = TaskTrace.from_tasks([seen(40)], observer, 5.0, is_orderly=True)

    trace.note_open({1: seen(52, fence=8)}, 5.1)  # 50, and two by the next holder

    assert trace.kept_share == 1.0


def test_a_task_that_its_holder_keeps_loses_nothing() -> None:
    trace = TaskTrace.from_tasks([seen(40)], Observer(snapshot_s=1.0), 0.0)

    trace.note_open({1: seen(40)}, 1.0)
    assert trace.open_ids == [1]
    trace.note_open({}, 2.0)

    assert trace.open_ids == []
    assert not trace.any_moved
    assert trace.kept_share == 1.0


def test_a_store_that_went_back_in_time_is_seen_to_have_lost_tokens() -> None:
    trace = TaskTrace.from_tasks([seen(40)], Observer(snapshot_s=1.0), 0.0)

    trace.note_open({1: seen(10, fence=9)}, 1.0)

    assert trace.kept_share == pytest.approx(0.25)


def test_the_table_says_what_was_not_run_and_what_did_not_hold() -> None:
    rows = [
        FaultResult("a", "first", skipped="no root"),
        FaultResult(
            "b", "second", 1.0, 2.0, 0.5, tasks=4, charged=1, violations=["I2: one is gone"]
        ),
    ]

    lines = results_as_markdown(rows).splitlines()

    assert lines[2] == "| first | - | - | - | - | not run: no root |"
    assert lines[3] == "| second | 1.0 s | 2.0 s | 50.0% | 1 of 4 | I2: one is gone |"


@pytest.fixture
def ends() -> Iterator[tuple[Proxy, socket.socket, socket.socket]]:
    """A connection through the proxy: the proxy, the near end, the far end."""
    with (
        closing(socket.create_server(("127.0.0.1", 0))) as server,
        Proxy("127.0.0.1", server.getsockname()[1]) as proxy,
        closing(socket.create_connection(("127.0.0.1", proxy.port), WAIT_S)) as near,
    ):
        far, _ = server.accept()
        with closing(far):
            far.settimeout(WAIT_S)
            near.sendall(b"hello")
            assert far.recv(5) == b"hello"
            yield proxy, near, far


def test_a_blocked_proxy_passes_nothing_on_until_it_flows(
    ends: tuple[Proxy, socket.socket, socket.socket],
) -> None:
    proxy, near, far = ends

    proxy.block()
    proxy.settle()
    near.sendall(b"later")
    far.settimeout(0.2)
    with pytest.raises(TimeoutError):
        far.recv(5)
    proxy.flow()
    far.settimeout(WAIT_S)

    assert far.recv(5) == b"later"


def test_a_reset_is_seen_at_both_ends(ends: tuple[Proxy, socket.socket, socket.socket]) -> None:
    proxy, near, far = ends

    proxy.reset()

    for end in (near, far):
        with pytest.raises(ConnectionResetError):
            end.recv(1)


def test_a_half_open_connection_ends_for_the_far_side_alone(
    ends: tuple[Proxy, socket.socket, socket.socket],
) -> None:
    proxy, near, far = ends

    proxy.half_open()

    with pytest.raises(ConnectionResetError):
        far.recv(1)
    near.sendall(b"into nothing")
    near.settimeout(0.2)
    with pytest.raises(TimeoutError):
        near.recv(1)


def test_a_slow_close_reaches_the_far_side_later(
    ends: tuple[Proxy, socket.socket, socket.socket],
) -> None:
    proxy, near, far = ends

    proxy.close_slowly(0.5)

    assert near.recv(1) == b""
    far.settimeout(0.1)
    with pytest.raises(TimeoutError):
        far.recv(1)
    far.settimeout(WAIT_S)
    assert far.recv(1) == b""
