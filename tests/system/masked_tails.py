"""The three values of `buffer.on_stale` where a few answers last for many batches.

    python -m tests.system.masked_tails --done FOLDER

Each run trains the demo at a lag bound of 2. Sampled answers stand still for a while after two
tokens, a few of them for seconds (`support/tailed_words.py`): their first tokens are stale when
their last ones are fresh. A run that FOLDER has is not made again, and one that was ended goes on.
The exit code is 1 where masking leaves a fresh token untrained, trains a stale one or drops a group
for its age, or where its mean accuracy over the batches is farther from that of dropping than seeds
of one of them are from each other.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Self

from tests.system.support import tailed_words
from tests.system.support.live_run import TORCH, LiveRun

ARMS = ("drop", "mask", "train")
SEEDS = (0, 1, 2)
STEPS, GROUP, MAX_LAG = 50, 8, 2
PATIENCE_S = 900.0
WORDS = {
    "dataset": "spell_backward",
    "prompt_style": "compact",
    "min_word_len": 3,
    "max_word_len": 6,
    "dense": True,
}
SETTINGS = (
    *TORCH,
    f"run.environment={tailed_words.__file__}:TailedWords",
    f"run.environment_settings={json.dumps(WORDS)}",
    f"run.steps={STEPS}",
    f"run.max_policy_lag={MAX_LAG}",
    f"run.group_size={GROUP}",
    f"run.groups_per_batch={256 // GROUP}",
)


@dataclass(frozen=True)
class Outcome:
    """What a whole run came to."""

    before: float
    after: float
    """Greedy answers to held-out words that are right."""
    curve: float
    """The mean over the evaluations after the first."""
    fresh_trained: float
    sampled_trained: float
    stale_groups: int
    """Groups dropped for their age."""
    lag_max: int

    @classmethod
    def from_run(cls, run: LiveRun) -> Self:
        summary, rows = run.summary(), run.lines("metrics")
        before, *later = (line["accuracy"] for line in run.lines("eval"))
        dropped = summary["tasks_dropped_by_reason"].get("stale", 0)
        return cls(
            before,
            later[-1],
            mean(later),
            summary["fresh_trained_fraction"],
            summary["sampled_trained_fraction"],
            dropped // GROUP,
            max(row["policy_lag_max"] for row in rows),
        )

    def cells(self) -> str:
        accuracies = f"{self.before:.3f} | {self.after:.3f} | {self.curve:.3f}"
        shares = f"{self.fresh_trained:.1%} | {self.sampled_trained:.1%}"
        return f"{accuracies} | {shares} | {self.stale_groups} | {self.lag_max}"


def trained(folder: Path, arm: str, seed: int) -> Outcome:
    """Train a run to its end, unless it has got there before."""
    own = folder / f"{arm}-{seed}"
    own.mkdir(parents=True, exist_ok=True)
    run = LiveRun(own, "demo.yaml", *SETTINGS, f"run.seed={seed}", f"buffer.on_stale={arm}")
    if not (run.folder / "summary.json").exists():
        with run.up() as process:
            run.finish(process, within_s=PATIENCE_S)
    return Outcome.from_run(run)


def holds(outcomes: dict[str, list[Outcome]]) -> bool:
    """Whether masking trains all fresh tokens, drops nothing, and learns as dropping does."""
    masking = outcomes["mask"]
    is_whole = all(run.fresh_trained == 1.0 and run.stale_groups == 0 for run in masking)
    is_bounded = all(run.lag_max <= MAX_LAG for run in masking)
    masked, dropped = ([run.curve for run in outcomes[arm]] for arm in ("mask", "drop"))
    spread = max(max(curves) - min(curves) for curves in (masked, dropped))
    return is_whole and is_bounded and abs(mean(masked) - mean(dropped)) <= spread


def main() -> int:
    """Print a row for each run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--done", type=Path, default=Path("runs/masked-tails"))
    folder = parser.parse_args().done.absolute()
    outcomes: dict[str, list[Outcome]] = {arm: [] for arm in ARMS}
    for seed in SEEDS:
        for arm, own in outcomes.items():
            own.append(trained(folder, arm, seed))
            print(f"| {arm} | {seed} | {own[-1].cells()} |", flush=True)
    return int(not holds(outcomes))


if __name__ == "__main__":
    raise SystemExit(main())
