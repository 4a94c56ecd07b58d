"""Runs that are killed or run out of memory, beside those that go through.

    python -m tests.learner.support.lives.resumed_runs --ranks 1 2 --kills 24 --seed 1

Prints what differs at their ends; the exit code is 1 if anything does.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from learner.checkpointing.folders import complete_checkpoints, step_of
from learner.loop import MEMORY_FILE
from tests.conftest import running_redis
from tests.learner.support.lives.recorded_run import KINDS, Kill, RecordedRun, recorded_settings

CLOSE = 1e-5
SURVIVES_S = 0.3
"""The most by which other ranks outlive the first that ends; the launcher takes 0.1 s."""


@dataclass(frozen=True, slots=True)
class Findings:
    """How runs ended beside those that went through."""

    kills: list[tuple[int, int]]
    """Newest batch in metrics.jsonl, and newest checkpoint, when each life was killed."""
    of_kills: list[str]
    """What differs after them; empty = equal to the bit."""
    of_memory: list[str]
    """What differs after a run out of memory from one that knew of it from its beginning."""
    distance: float
    """The largest difference of a parameter from a run with all the memory."""

    @property
    def is_good(self) -> bool:
        """Whether every run ended as it should."""
        return not self.of_kills and not self.of_memory and self.distance <= CLOSE

    def __str__(self) -> str:
        """Report for people."""
        lines = [
            f"killed {len(self.kills)} times, at (batch, checkpoint):",
            " ".join(map(str, self.kills)),
            *(self.of_kills[:40] or ["ends equal to the bit"]),
            f"out of memory: parameters {self.distance:.1e} from those of a run with all of it",
            *(self.of_memory[:40] or ["ends equal to the bit"]),
        ]
        return "\n    ".join(lines)


def find(folder: Path, *, kills: int, batch: int | None, seed: int, **shape: Any) -> Findings:
    """Kill a run so often, and have another run out of memory in a batch, if one is named."""
    with running_redis(folder) as url:
        plain = make_run(folder, "plain", url, **shape)
        used_s = _cpu_s()
        assert plain.live()
        whole_s = _cpu_s() - used_s
        moments: list[tuple[int, int]] = []
        of_kills: list[str] = []
        if kills:
            killed = make_run(folder, "killed", url, **shape)
            moments = kill_again_and_again(killed, plain, whole_s, kills=kills, seed=seed)
            of_kills = differences(killed, plain)
        of_memory: list[str] = []
        distance = 0.0
        if batch is not None:
            knowing, short = (make_run(folder, name, url, **shape) for name in ("knowing", "short"))
            of_memory, distance = compare_out_of_memory(plain, knowing, short, batch=batch)
        return Findings(moments, of_kills, of_memory, distance)


def make_run(folder: Path, name: str, url: str, **shape: Any) -> RecordedRun:
    """Begin a run, and record its episodes."""
    run = RecordedRun(recorded_settings(folder, name, **shape), url)
    run.record()
    return run


def kill_again_and_again(
    run: RecordedRun, plain: RecordedRun, whole_s: float, *, kills: int, seed: int
) -> list[tuple[int, int]]:
    """Run it with kills at moments that `plain` went through.

    Args:
        run: To be killed.
        plain: Has ended.
        whole_s: CPU seconds that all its ranks used.
        kills: How many.
        seed: Of the moments.

    Returns:
        Newest batch in metrics.jsonl, and newest checkpoint, when each life was killed.
    """
    ranks = run.settings.learner.ranks
    start_s = float((plain.folder / "began-0").read_text())
    # The time of two checkpoints.
    stretch_s = (whole_s / ranks - start_s) * min(1.0, 6 / run.settings.run.steps)
    chance = random.Random(seed)
    moments: list[tuple[int, int]] = []
    while len(moments) < kills:
        is_early = chance.random() < 0.15  # in the middle of a start
        at_s = chance.uniform(0, start_s) if is_early else start_s + chance.uniform(0, stretch_s)
        kill = Kill(chance.randrange(ranks), at_s, chance.uniform(0, SURVIVES_S))
        if run.live(kill=kill):
            return moments
        moments.append(_reached(run))
    assert run.live()
    return moments


def compare_out_of_memory(
    plain: RecordedRun, knowing: RecordedRun, short: RecordedRun, *, batch: int
) -> tuple[list[str], float]:
    """Have the last rank of `short` run out of memory in the middle of a batch.

    Args:
        plain: Has all the memory, and has ended.
        knowing: Goes through with half the tokens from that batch on.
        short: Runs out of memory.
        batch: In which it does.

    Returns:
        What differs between the last two; and the largest difference of a parameter between the
        first and the last.
    """
    ranks = short.settings.learner.ranks
    knowing.folder.mkdir(parents=True)
    (knowing.folder / MEMORY_FILE).write_text(f"[{batch}]")
    assert knowing.live()
    ends = short.run_out_of_memory(batch, ranks - 1)
    assert len(ends) == ranks and 0 not in ends, "all ranks end, and by themselves"
    assert (short.folder / MEMORY_FILE).read_text() == f"[{batch}]"
    assert "OutOfMemory" in short.log()
    assert short.live()
    ours, theirs = short.tensors(), plain.tensors()
    distance = max(
        float((ours[name] - theirs[name]).abs().max())
        for name in ours
        if name.startswith(("model.", "critic."))
    )
    return differences(short, knowing), distance


def differences(one: RecordedRun, other: RecordedRun) -> list[str]:
    """Name what differs between the ends of two runs."""
    ours, theirs = one.tensors(), other.tensors()
    found = [f"{name} is there once" for name in ours.keys() ^ theirs.keys()]
    found += [
        f"{name} differs"
        for name in ours.keys() & theirs.keys()
        if not torch.equal(ours[name], theirs[name])
    ]
    for file in ("batches", "metrics"):
        nothing: dict[str, Any] = {}
        pairs = itertools.zip_longest(one.lines(file), other.lines(file), fillvalue=nothing)
        for a, b in pairs:
            found += [
                f"{file} {a.get('step')} {key}: {a.get(key)} {b.get(key)}"
                for key in sorted(a.keys() | b.keys())
                if a.get(key) != b.get(key)
            ]
    return sorted(found)


def _reached(run: RecordedRun) -> tuple[int, int]:
    metrics = run.folder / "metrics.jsonl"
    trained = len(metrics.read_text().splitlines()) if metrics.exists() else 0
    saved = complete_checkpoints(run.folder / "checkpoints")
    return trained, step_of(saved[-1]) if saved else 0


def _cpu_s() -> float:
    """CPU seconds of all processes that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def main() -> None:
    """Compare runs on each number of ranks, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--kills", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    failed = False
    for ranks, kind in itertools.product(chosen.ranks, chosen.kinds):
        with tempfile.TemporaryDirectory() as place:
            found = find(
                Path(place),
                ranks=ranks,
                kind=kind,
                steps=chosen.steps,
                kills=chosen.kills,
                batch=5,
                seed=chosen.seed,
            )
        print(f"{ranks} ranks, {kind}:", found, flush=True)
        failed = failed or not found.is_good
    sys.exit(failed)


if __name__ == "__main__":
    main()
