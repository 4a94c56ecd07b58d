"""The journal of a run: `metrics.jsonl`, `batches.jsonl`, `eval.jsonl` and `summary.json`.

`metrics.jsonl` and `batches.jsonl` (the groups of each batch) have one line for each batch,
`eval.jsonl` one for each evaluation; `summary.json` is written when the run has finished. Whole
lines are appended, so that only the last line of a crashed process can be incomplete; a resume
removes the lines of the abandoned branch, so that a file holds a single history.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from buffer.operations.values import Stats
from configs import durable
from configs.settings import RunSettings
from learner.data.grades import ACCURACY, HeldOut, held_out
from learner.weights.log import paused_fraction

from .run_snapshot import RunSnapshot

if TYPE_CHECKING:  # they import torch, and a list of checkpoints needs none
    from learner.training.guards import GuardState

    from .metrics import Totals

FigureValue = float | int | bool | str | dict[str, float] | dict[str, int]

# --------------------------------------------------------------------------------------------------
# The figures of `summary.json`, written once, after the last batch.


def summarise(
    run: RunSettings,
    totals: Totals,
    guards: GuardState,
    stats: Stats,
    evaluations: Sequence[dict[str, Any]],
) -> dict[str, object]:
    """Return the figures of the whole run for its summary.

    `generated_tokens` counts the sampled and environment tokens of all trained and dropped
    episodes. `learner_idle_fraction` is the time spent waiting for batches over wall time; both
    run, in each life of the learner, from the moment its first batch was complete until its last
    optimizer step. `learner_idle_for_weights_fraction` is the time that a packed batch waited
    for the weights of the last one to be handed over, over the same span;
    `generation_paused_fraction` is that of all actors' swaps over the time they served.
    """
    paused = paused_fraction(run.folder)
    span_s = totals.busy_span_s
    last = next((line for line in evaluations if line["step"] == run.steps), {})
    return {
        **_held_out(run, evaluations),
        "held_out_sampled": last.get("sampled", {}),
        "steps": run.steps,
        "episodes": totals.episodes,
        "reused_episodes": totals.reused_episodes,
        "resumed_episodes": totals.resumed_episodes,
        "generated_tokens": totals.completion_tokens + totals.dropped_tokens,
        "trained_tokens": totals.trained_tokens,
        "wall_s": round(totals.wall_s, 2),
        "learner_idle_fraction": round(totals.idle_fraction, 4),
        "learner_idle_for_weights_fraction": round(totals.weights_s / span_s, 4) if span_s else 0.0,
        "generation_paused_fraction": round(paused, 4) if paused is not None else None,
        "policy_lag_mean": round(totals.policy_lag_mean, 4),
        "policy_lag_max": totals.policy_lag_max,
        **{name: round(value, 4) for name, value in totals.fresh_tokens.figures().items()},
        "skipped_steps": totals.skipped_steps,
        "skipped_for_loss": totals.skipped_for_loss,
        "rollbacks": guards.rollbacks,
        "learner_lives": stats.lineage,
        "tasks_created": stats.created,
        "tasks_committed": stats.committed,
        "tasks_dropped": sum(stats.dropped.values()),
        "tasks_dropped_by_reason": stats.dropped,
        "tasks_dead": stats.dead,
        "tasks_cancelled": stats.cancelled,
    }


def _held_out(run: RunSettings, evaluations: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """Return score and reward before and after, under the name of the metric."""
    results = {line["step"]: result for line in evaluations if (result := held_out(line))}
    before, after = results.get(0), results.get(run.steps)
    newest = after or before
    title = newest.title if newest else ACCURACY
    name = f"held_out_{title.replace(' ', '_')}"
    last = next((line for line in evaluations if line["step"] == run.steps), {})
    by_environment = (last.get("environments") or {}) if run.environments else {}
    of_each = {environment: held_out(figures) for environment, figures in by_environment.items()}
    figures: dict[str, object] = {
        f"{name}_before": before.score if before and before.title == title else None,
        f"{name}_after": after.score if after else None,
        f"{name}_by_environment": {
            environment: result.score if result else None for environment, result in of_each.items()
        },
    }
    ends = {"before": before, "after": after}
    if any(result is not None and result.reward is not None for result in ends.values()):
        figures |= {
            f"held_out_reward_{when}": result.trained
            for when, result in ends.items()
            if result is not None
        }
    return figures


# --------------------------------------------------------------------------------------------------
# The journal of a run: `metrics.jsonl`, `batches.jsonl`, `eval.jsonl` and `summary.json`.


class Journal:
    """Writes the run folder's files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.run_snapshot = RunSnapshot()
        """Snapshot of the appended lines, and of those that `rewind` has kept."""
        folder.mkdir(parents=True, exist_ok=True)

    def append(self, name: str, figures: Mapping[str, object]) -> None:
        """Add a line to `<name>.jsonl`."""
        line = finite(figures)
        with (self._folder / f"{name}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, default=str) + "\n")
        self._update_snapshot(name, line)

    def lines(self, name: str) -> list[dict[str, FigureValue]]:
        """Read `<name>.jsonl`; a line that a crash or the disk damaged is left out."""
        path = self._folder / f"{name}.jsonl"
        if not path.exists():
            return []
        parsed = []
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                figures = json.loads(line)
            except (ValueError, RecursionError):
                continue  # the last line of a killed process, or of a machine that lost its power
            step = figures.get("step") if isinstance(figures, dict) else None
            if isinstance(step, int | float) and not isinstance(step, bool):
                parsed.append(figures)
        return parsed

    def held_out(self) -> dict[int, HeldOut]:
        """Read the result of each evaluation: step -> score and metric."""
        return {
            int(str(line["step"])): result
            for line in self.lines("eval")
            if (result := held_out(line)) is not None
        }

    def scores(self) -> dict[int, float]:
        """Return step -> score, for evaluations with the metric of the newest one."""
        results = self.held_out()
        newest = results[max(results)].title if results else ""
        return {step: result.score for step, result in results.items() if result.title == newest}

    def rewind(self, step: int) -> None:
        """Remove the lines of later steps, and `summary.json`: the learner resumes after `step`."""
        self.run_snapshot = RunSnapshot()
        for name in ("metrics", "batches", "eval"):
            kept = [line for line in self.lines(name) if float(str(line["step"])) <= step]
            text = "".join(json.dumps(line) + "\n" for line in kept)
            self._replace(f"{name}.jsonl", text)
            for line in kept:
                self._update_snapshot(name, line)
        (self._folder / "summary.json").unlink(missing_ok=True)

    def summarise(self, summary: Mapping[str, object]) -> None:
        """Write `summary.json`; call it when the run has finished."""
        self._replace("summary.json", json.dumps(summary, indent=2) + "\n")

    def _update_snapshot(self, name: str, line: Mapping[str, object]) -> None:
        """Add a new line to what the live view shows."""
        if name == "metrics":
            self.run_snapshot.add_batch(line)
        elif name == "eval":
            self.run_snapshot.add_evaluation(line)

    def _replace(self, name: str, text: str) -> None:
        durable.replace_file(self._folder / name, text)


def finite(figures: Mapping[str, object]) -> dict[str, object]:
    """Replace figures that are not finite, which JSON cannot hold, by None; not within maps."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in figures.items()
    }
