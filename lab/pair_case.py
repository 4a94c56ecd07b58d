"""Two faults at once, each written for itself, which begin together; pairs drawn from a seed.

`nyala chaos --pairs` draws pairs and runs them as faults of a matrix.

    prepare one, then the other -> begin both -> each lasts and ends -> recover from both

Each fault runs in a thread of its own, and the threads take turns: one goes on only while the other
sleeps, so no fault sees unfinished steps of the other. A fault that has to be prepared at the last
moment (a process that is stopped in a short state) is prepared second.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path

from configs.json_lines import number, read_rows
from configs.worker import Worker

from .fault_case import Fault, FaultCase
from .faults import clock_jumps, network, processes, stores
from .live_run import STALL_S, ExpectationFailed, LiveRun
from .task_trace import TaskTrace

END_S = 10.0  # until the thread of a fault that was given up has ended
LONGEST_S = 3 * STALL_S  # of one fault, with its preparation and recovery


class TurnLock:
    """Lets one of several threads run at a time; the turn passes while it sleeps."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._is_over = False

    def __enter__(self) -> None:
        self._turn.acquire()

    def __exit__(self, *_: object) -> None:
        self._turn.release()

    def sleep(self, seconds: float) -> None:
        """Sleep, and let the other threads run meanwhile.

        Raises:
            ExpectationFailed: The faults were given up.
        """
        self._turn.release()
        try:
            time.sleep(seconds)
        finally:
            self._turn.acquire()
        if self._is_over:
            raise ExpectationFailed("this fault is given up, because the pair has ended")

    def end_turns(self) -> None:
        """Let no thread go on, because its changes of the run would not be undone."""
        self._is_over = True


@dataclass(slots=True)
class PairProgress:
    """Progress of the two faults of a pair."""

    prepared: int = 0
    ended: int = 0
    failure: str | None = None

    def check_other_fault(self) -> None:
        """Raise in one thread when the other has failed.

        Raises:
            ExpectationFailed: The other fault has failed.
        """
        if self.failure is not None:
            raise ExpectationFailed(f"the other fault of the pair has failed: {self.failure}")


class PairCase(FaultCase):
    """One fault of a pair: begins and recovers together with the other."""

    def __init__(self, run: LiveRun, progress: PairProgress, *, delay_s: float) -> None:
        """Prepare.

        Args:
            run: The run to hurt.
            progress: Progress of both faults.
            delay_s: Time after the common beginning at which this fault is injected.
        """
        super().__init__(run)
        self._progress = progress
        self._delay_s = delay_s

    def inject(self, act: Callable[[], None], sign: Callable[[], bool] | None = None) -> None:
        """Begin the fault when the other is prepared too."""
        self._step = max(self._step, self.run.step)
        self._progress.prepared += 1
        self._wait_for_other(lambda: self._progress.prepared == 2, "the other fault's preparation")
        if self._delay_s:
            self.run.sleep(self._delay_s)
        super().inject(act, sign)

    def recover(self) -> None:
        """Wait until the other fault has ended too, then for the recovery from both."""
        self._progress.ended += 1
        self._wait_for_other(lambda: self._progress.ended == 2, "the other fault's end")
        super().recover()

    def wait_for_first(self) -> None:
        """Wait until the other fault is prepared."""
        self._wait_for_other(lambda: self._progress.prepared == 1, "the first fault's preparation")

    def _wait_for_other(self, condition: Callable[[], bool], what: str) -> None:
        self.run.until(condition, what, look=self._progress.check_other_fault)


def inject_both(case: FaultCase, first: Fault, second: Fault, *, delay_s: float) -> None:
    """Inject two faults together and wait for the recovery; `case` receives the measurements.

    Args:
        case: Case of the pair.
        first: Fault that is prepared first.
        second: Fault that is prepared last.
        delay_s: Time from the first to the second; negative if the second comes first.

    Raises:
        NyalaError: The run did not come back from one of them.
    """
    run, turns, progress = case.run, TurnLock(), PairProgress()
    cases = (
        PairCase(run, progress, delay_s=max(0.0, -delay_s)),
        PairCase(run, progress, delay_s=max(0.0, delay_s)),
    )

    def act(fault: Fault, mine: PairCase, *, is_second: bool) -> None:
        with turns:
            try:
                if is_second:
                    mine.wait_for_first()
                fault.act(mine)
            except BaseException as error:
                progress.failure = progress.failure or str(error)
                raise

    workers = [
        Worker(lambda: act(first, cases[0], is_second=False), name=first.name),
        Worker(lambda: act(second, cases[1], is_second=True), name=second.name),
    ]
    run.sleep = turns.sleep
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(LONGEST_S)
            if worker.is_alive:
                raise ExpectationFailed(
                    f"a pair of faults must end within {LONGEST_S:g} s, got one that has not; look "
                    f"into {run.log}"
                )
    finally:
        turns.end_turns()
        for worker in workers:
            with suppress(BaseException):  # raised above already
                worker.join(END_S)
        run.sleep = time.sleep
        _sum_up(case, cases)


def _sum_up(case: FaultCase, cases: tuple[PairCase, PairCase]) -> None:
    """Combine the measurements of both faults into those of the pair."""
    one, other = cases
    case.trace = TaskTrace({**one.trace.tasks, **other.trace.tasks})
    detected = [c.detected_s for c in cases if c.detected_s is not None]
    recovered = [c.recovered_s for c in cases if c.recovered_s is not None]
    case.detected_s = min(detected, default=None)
    case.recovered_s = max(recovered) if len(recovered) == len(cases) else None
    case.remark = "; ".join(filter(None, (one.remark, other.remark)))


# --------------------------------------------------------------------------------------------------
# Pairs of faults, their order and the time between them, drawn from a seed.

NUM_PAIRS = 40
APART_S = 0.6  # `nyala up` starts a dead process again after half a second
KINDS: tuple[tuple[str, ...], ...] = (
    ("actor-kill", "actors-kill-all"),
    ("broker-kill",),
    ("redis-rewind",),
    ("redis-failover",),
    ("learner-kill-saving",),
    ("redis-disk-full", "checkpoint-disk-full"),
    ("clock-forwards", "clock-backwards"),
    ("net-half-open",),
)
"""Kinds of faults; the variants of one kind take turns."""
IMPOSSIBLE = (
    {"redis-rewind", "redis-failover"},  # both exchange the log of the same dead server
    {"redis-disk-full", "redis-failover"},  # a replica's files need room
    # Both wait for the same moment of the same process.
    {"checkpoint-disk-full", "learner-kill-saving"},
)
OVERRIDES = ("run.max_policy_lag=64", "actors.max_concurrent_episodes=32")
"""More unfinished episodes, and a wide bound of lag. A bound of a few batches would drop episodes
while a lease expires, and a resumed episode that is not trained shows nothing."""
PREPARED_LAST = ("actor-kill", "actors-kill-all", "learner-kill-saving")
"""Faults that stop their victim in a short state, the shortest one last."""

_FAULTS = {
    fault.name: fault
    for faults in (
        processes.FAULTS,
        stores.FAULTS,
        network.FAULTS,
        clock_jumps.FAULTS,
    )
    for fault in faults
}


def draw_pairs(seed: int, count: int = NUM_PAIRS) -> tuple[Fault, ...]:
    """Draw pairs: each two kinds once in random order, then again with other variants."""
    draw = random.Random(seed)
    kinds = [pair for pair in combinations(KINDS, 2) if _choices(*pair)]
    pairs: list[Fault] = []
    for turn in range(count):
        if turn % len(kinds) == 0:
            draw.shuffle(kinds)
        choices = _choices(*kinds[turn % len(kinds)])
        names = choices[(turn // len(kinds)) % len(choices)]
        pairs.append(_pair(names, turn + 1, draw.uniform(-APART_S, APART_S)))
    return tuple(pairs)


def resumed_episodes(folder: Path) -> int:
    """Count trained episodes that another actor had begun, over all runs in a folder."""
    rows = [row for file in folder.glob("*/metrics.jsonl") for row in read_rows(file)]
    return int(sum(number(row, "resumed_episodes") for row in rows))


def _choices(one: Sequence[str], other: Sequence[str]) -> list[tuple[str, str]]:
    """Return the variants of two kinds that are possible together."""
    pairs = [(a, b) for a in one for b in other]
    return [pair for pair in pairs if set(pair) not in IMPOSSIBLE]


def _pair(names: tuple[str, str], number: int, delay_s: float) -> Fault:
    """Make one fault of two, named by its number and theirs."""
    first, second = sorted(names, key=_rank)
    faults = (_FAULTS[first], _FAULTS[second])
    obstacles = [fault.obstacle for fault in faults]
    return Fault(
        f"{number:02}.{first}.{second}",
        f"{faults[0].what}, and {faults[1].what}",
        partial(inject_both, first=faults[0], second=faults[1], delay_s=delay_s),
        lambda: next(filter(None, (obstacle() for obstacle in obstacles)), None),
        # All pairs share these surroundings, so that they can follow each other on one run.
        None if clock_jumps.obstacle() else clock_jumps.shiftable,
        OVERRIDES,
    )


def _rank(name: str) -> int:
    return PREPARED_LAST.index(name) if name in PREPARED_LAST else -1
