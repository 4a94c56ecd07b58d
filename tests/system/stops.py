"""Stops of a run in mid-batch, each many times at random moments, and the same command after each.

    python -m tests.system.stops --times 3
    python -m tests.system.stops --times 10 --model FOLDER     of a Hugging Face model
    python -m tests.system.stops --times 3 --ranks 2

No checkpoint is due, so what a stop does not save is trained again. After each: how long it took
until no process was left, what it left in shared memory, and whether all that was trained stands as
it was, with one batch at most that is replayed. The exit code is 1 where something else was found.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import Popen
from typing import Any

from buffer import operations
from buffer.store import Store
from configs.errors import StoreError
from lab.actor_fleet import descendants
from tests.system.support import early_letters
from tests.system.support.live_run import TORCH, LiveRun
from tests.waiting import is_alive

LIMIT_S = 10.0
PATIENCE_S = 900.0
HURRY_S = 0.5  # between two times Ctrl-C
COMMON = (
    *TORCH,
    f"run.reward={early_letters.__file__}:early_letters",
    "run.group_size=8",
    "run.groups_per_batch=8",
    "run.max_completion_tokens=64",
    "run.steps=100000",
    "run.eval_every=0",
    "run.eval_episodes=0",
    "broker.max_attempts=100",  # some of these stops leave leases to expire, ten times in a row
    "broker.lease_timeout_s=3",
    "learner.device=cpu",
    "learner.lr=1e-6",
    "learner.checkpoint_every=100000",
    "learner.checkpoint_minutes=null",
)
MADE = ("learner.init_layers=4", "learner.init_width=256", "learner.warm_start_steps=0")
"""A model whose batches take seconds."""
GENTLE = ("ctrl-c", "sighup")
"""Stops after which no attempt is charged to a task."""


def interrupt(up: Popen[str], _pids: Sequence[int]) -> None:
    """Press Ctrl-C."""
    up.send_signal(signal.SIGINT)


def interrupt_twice(up: Popen[str], _pids: Sequence[int]) -> None:
    """Press it again soon."""
    up.send_signal(signal.SIGINT)
    time.sleep(HURRY_S)
    up.send_signal(signal.SIGINT)


def hang_up(up: Popen[str], _pids: Sequence[int]) -> None:
    """Close the terminal, whose shell passes the signal on as well."""
    up.send_signal(signal.SIGHUP)
    time.sleep(HURRY_S)
    up.send_signal(signal.SIGHUP)


def terminate_all(up: Popen[str], pids: Sequence[int]) -> None:
    """Tell every process to end, as a scheduler does."""
    for pid in (up.pid, *pids):
        if is_alive(pid):
            os.kill(pid, signal.SIGTERM)


def kill_up(up: Popen[str], _pids: Sequence[int]) -> None:
    """End the process that watches over all others."""
    up.kill()


Stop = Callable[[Popen[str], Sequence[int]], None]
STOPS: dict[str, Stop] = {
    "ctrl-c": interrupt,
    "ctrl-c twice": interrupt_twice,
    "sigterm to all": terminate_all,
    "kill -9 of up": kill_up,
    "sighup": hang_up,
}


class Stops:
    """A run that is stopped again and again."""

    def __init__(self, run: LiveRun, seed: int) -> None:
        self._run = run
        self._draw = random.Random(seed)
        self._trained: list[dict[str, Any]] = []
        """Lines of the batches that were trained when the run was last stopped."""
        self._attempts = 0
        self._batch_s = 0.0
        self.faults: list[str] = []

    def stop(self, name: str, *, is_charged: bool) -> None:
        """Go on with the run, stop it in mid-batch, and look at what it left."""
        with self._run.up() as up:
            self._see_going_on(name, is_charged=is_charged)
            moment_s = self._draw.uniform(0.0, self._batch_s)
            self._until_in_a_batch()
            time.sleep(moment_s)
            processes = descendants(up.pid)
            pids = sorted(processes)
            shared = {folder for pid in pids for folder in shared_folders(pid)}
            began = time.monotonic()
            STOPS[name](up, pids)
            last = up.pid

            def has_ended() -> bool:
                nonlocal last
                alive = [pid for pid in pids if is_alive(pid)]
                last = alive[-1] if alive else last
                return up.poll() is not None and not alive

            self._wait(has_ended, "the end")
            took_s = time.monotonic() - began
        self._trained = self._run.lines("metrics")
        self._expect(took_s <= LIMIT_S, f"{name}: ended within {LIMIT_S:g} s, got {took_s:.1f} s")
        left = [str(folder) for folder in shared if folder.exists()]
        self._expect(bool(shared) and not left, f"{name}: nothing in shared memory, got {left}")
        kept = sorted(path.name for path in (self._run.folder / "checkpoints").iterdir())
        torn = [folder for folder in kept if not re.fullmatch(r"step-\d{6}", folder)]
        self._expect(not torn, f"{name}: whole checkpoints, got {torn}")
        newest = f"step-{len(self._trained):06d}"
        self._expect(newest in kept, f"{name}: a checkpoint {newest}, got {kept}")
        print(
            f"{name}: {moment_s:.1f} s into a batch, ended in {took_s:.1f} s, and "
            f"last {' '.join(processes.get(last, ['up']))[:60]}",
            flush=True,
        )

    def finish(self, *, is_charged: bool) -> None:
        """Look at what the last stop left."""
        with self._run.up():
            self._see_going_on("the end", is_charged=is_charged)

    def _see_going_on(self, name: str, *, is_charged: bool) -> None:
        """Wait for a batch of this life; what was trained before must be as it was."""
        before = len(self._trained)
        self._wait(lambda: self._stats() is not None, "a store")
        attempts = self._charged()
        if not is_charged:
            self._expect(
                attempts <= self._attempts,
                f"before {name}: no attempt is charged, got {attempts} after {self._attempts}",
            )
        self._attempts = attempts
        self._wait(lambda: len(self._run.lines("metrics")) > before + (not before), "a batch")
        self._expect_one_history(f"before {name}")
        self._attempts = self._charged()
        stats = self._stats()
        counted = sum(stats.by_state.values())
        self._expect(stats.created == counted, f"before {name}: all {stats.created}, got {counted}")
        self._expect(not stats.dead, f"before {name}: none given up, got {stats.dead}")
        if not self._batch_s:
            lines = self._run.lines("metrics")
            self._batch_s = float(lines[-1]["time"] - lines[-2]["time"])
            print(f"a batch takes {self._batch_s:.1f} s", flush=True)

    def _expect_one_history(self, when: str) -> None:
        before, lines = self._trained, self._run.lines("metrics")
        self._expect(lines[: len(before)] == before, f"{when}: what was trained stands as it was")
        steps = [line["step"] for line in lines]
        self._expect(steps == list(range(1, len(steps) + 1)), f"{when}: one history, got {steps}")
        again = [line["step"] for line in lines[len(before) :] if line["is_replay"]]
        self._expect(again in ([], [len(before) + 1]), f"{when}: one replay at most, got {again}")

    def _until_in_a_batch(self) -> None:
        def is_trained_on() -> bool:
            stats = self._stats()
            return stats is not None and any(
                claim.sealed and claim.k == stats.version + 1 for claim in stats.claims
            )

        self._wait(is_trained_on, "a batch under way")

    def _stats(self) -> Any:
        return self._ask(operations.stats())

    def _charged(self) -> int:
        """Attempts that are charged to open tasks."""
        tasks = self._ask(operations.inspect()) or {}
        return sum(task.attempts for task in tasks.values())

    def _ask(self, operation: Any) -> Any:
        try:
            url = (self._run.folder / "redis.url").read_text().strip()
            with Store(url, self._run.folder.name) as store:
                return store.run(operation)
        except (OSError, StoreError):
            return None

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        self._run.wait_until(condition, what, within_s=PATIENCE_S)

    def _expect(self, holds: bool, what: str) -> None:
        if not holds:
            self.faults.append(what)
            print(f"NOT {what}", flush=True)


def shared_folders(pid: int) -> set[Path]:
    """Return the folders in shared memory whose files a process has mapped."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()
    except OSError:  # it has just ended
        return set()
    paths = [line.split(maxsplit=5)[5] for line in lines if "/nyala-" in line]
    return {Path(path.removesuffix(" (deleted)")).parent for path in paths}


def main() -> int:
    """Stop a run in each way so often; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.system.stops", description=__doc__)
    parser.add_argument("--times", type=int, default=3, help="of each kind")
    parser.add_argument("--seed", type=int, default=1, help="of the moments")
    parser.add_argument("--only", choices=[*STOPS], action="append", help="kinds; default: all")
    parser.add_argument("--model", help="folder of a Hugging Face model")
    parser.add_argument("--ranks", type=int, default=1, help="of the learner")
    parser.add_argument("--set", action="append", default=[], metavar="table.key=value")
    chosen = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` ignores it for us
    model = MADE if chosen.model is None else (f"run.model={chosen.model}", "run.dtype=float32")
    room = "run.max_prompt_tokens=64"
    overrides = (*COMMON, *model, room, f"learner.ranks={chosen.ranks}", *chosen.set)
    with tempfile.TemporaryDirectory(prefix="stops-") as folder:
        stops = Stops(LiveRun(Path(folder), "tiny.yaml", *overrides), chosen.seed)
        kinds = [name for name in chosen.only or STOPS for _ in range(chosen.times)]
        before = GENTLE[0]
        for name in kinds:
            stops.stop(name, is_charged=before not in GENTLE)
            before = name
        stops.finish(is_charged=before not in GENTLE)
    print(f"{len(kinds)} stops, {len(stops.faults)} faults", flush=True)
    return 1 if stops.faults else 0


if __name__ == "__main__":
    sys.exit(main())
