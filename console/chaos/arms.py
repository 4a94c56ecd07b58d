"""One arm of the kill runs: a whole run, left alone or disturbed at a fixed pace, and its figures.

What the killed actors made is known from their heartbeats: the last count that the store has of
each, and its rate since then.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from buffer import operations
from configs.errors import StoreError
from console.chaos.fleet import Actor
from console.chaos.ring import Ring
from console.chaos.trail import Observer, Trail
from console.json_lines import number, read_rows
from console.run_folder import RunState

LOOK_S = 0.02
ACTORS_S = 0.5
END_S = 3600.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Harm(StrEnum):
    """What is done to an actor again and again."""

    NONE = "none"
    KILL = "kill"
    DRAIN = "drain"


@dataclass(slots=True)
class Arm:
    """What was seen of one run."""

    harm: Harm
    harmed: int = 0
    """Actors killed or asked to leave."""
    moved_s: list[float] = field(default_factory=list)
    """For each of their tasks: until another actor held it. From the kill, or, for an actor that
    drained, from when the store had it back."""
    lost: int = 0
    """Of their tasks, those that nobody went on with."""
    startup_cpu_s: float = 0.0
    """CPU time of replacements until they served."""
    made: dict[str, float] = field(default_factory=dict)
    """Incarnation -> tokens sampled."""
    summary: dict[str, float] = field(default_factory=dict)
    trained_tokens: float = 0.0
    wall_s: float = 0.0
    """From the first batch to the last."""

    @property
    def generated_tokens(self) -> float:
        """Tokens that all actors have sampled, evaluation and unfinished episodes included."""
        return sum(self.made.values())


class Watcher:
    """Follows a run to its end and harms its actors."""

    def __init__(self, ring: Ring, arm: Arm, *, every_s: float, say: Callable[[int], None]) -> None:
        self._ring = ring
        self._arm = arm
        self._every_s = every_s
        self._say = say
        self._trails: list[tuple[float, Trail]] = []
        self._turn = 0
        self._starting: list[Actor] = []

    def follow(self) -> None:
        """Until the run has finished."""
        ring, arm = self._ring, self._arm
        began = next_harm = time.monotonic()
        next_harm += self._every_s
        count_at = 0.0
        while ring.folder.state is not RunState.FINISHED:
            now = time.monotonic()
            if now - began > END_S:
                break
            if now >= count_at:
                self._count()
                count_at = now + ACTORS_S
            if arm.harm is not Harm.NONE and now >= next_harm and self._harm():
                next_harm = max(next_harm + self._every_s, now)
            self._look(now)
            ring.fleet.refill()
            time.sleep(LOOK_S)
        for began_at, trail in self._trails:
            self._note_end(began_at, trail)
        self._read()

    def _harm(self) -> bool:
        """Choose the next actor that is at work; False if there is none."""
        actors = [a for a in self._ring.fleet.actors if a.serving_at is not None]
        if len(actors) < len(self._ring.fleet.actors):
            return False  # one at a time: the last one's replacement is not there yet
        victim = actors[0]  # the oldest
        os.kill(victim.pid, signal.SIGSTOP if self._arm.harm is Harm.KILL else signal.SIGTERM)
        try:
            held = list(self._ring.store.run(operations.look()).values())
        except StoreError:
            held = []
        now = time.monotonic()
        mine = [task for task in held if task.incarnation == victim.incarnation]
        self._trails.append((now, Trail.of(mine, Observer(0.0), now)))
        if self._arm.harm is Harm.KILL:
            os.kill(victim.pid, signal.SIGKILL)
        self._arm.harmed += 1
        return True

    def _look(self, now: float) -> None:
        """Look at tasks of the victims, until they have moved."""
        open_trails = []
        for began_at, trail in self._trails:
            ids = trail.open_ids
            if not ids:
                self._note_end(began_at, trail)
                continue
            open_trails.append((began_at, trail))
            try:
                trail.note_open(self._ring.store.run(operations.look(ids)), now)
            except StoreError:
                continue
        self._trails = open_trails

    def _note_end(self, began_at: float, trail: Trail) -> None:
        for task in trail.tasks.values():
            if task.moved_at is not None:
                freed_at = task.freed_at if self._arm.harm is Harm.DRAIN else None
                self._arm.moved_s.append(task.moved_at - (freed_at or began_at))
            elif not task.settled:
                self._arm.lost += 1

    def _count(self) -> None:
        """Read what the actors have sampled and how far the run is."""
        ring = self._ring
        before = {a.incarnation for a in ring.fleet.actors if a.serving_at is not None}
        ring.fleet.all_serve()
        for actor in ring.fleet.actors:
            if actor.serving_at is not None and actor.incarnation not in before:
                self._arm.startup_cpu_s += _cpu_s(actor.pid)
        try:
            for seen in ring.store.run(operations.actors()):
                tokens, rate = (float(seen.fields.get(n, 0)) for n in ("tokens", "tokens_per_s"))
                silent_s = min(seen.silent_s, ring.settings.broker.heartbeat_timeout_s)
                has_ended = seen.incarnation not in {a.incarnation for a in ring.fleet.actors}
                # Of a dead one nothing more comes; of a living one the next look tells.
                known = self._arm.made.get(seen.incarnation, 0.0)
                guess = 0.0 if has_ended else rate * min(silent_s, 1.0)
                self._arm.made[seen.incarnation] = max(known, tokens + guess)
        except StoreError:
            return
        self._say(len(read_rows(ring.folder.metrics)))

    def _read(self) -> None:
        """Read the files of the finished run."""
        rows = read_rows(self._ring.folder.metrics)
        arm, folder = self._arm, self._ring.folder
        arm.summary = folder.read_summary()
        arm.trained_tokens = sum(number(row, "trained_tokens") for row in rows)
        arm.wall_s = number(rows[-1], "time") - number(rows[0], "time")


def _cpu_s(pid: int) -> float:
    """CPU time that a process has used."""
    try:
        stat = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(stat[11]) + int(stat[12])) / TICKS_PER_S
