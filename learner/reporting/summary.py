"""The figures of `summary.json`, written once, after the last batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from buffer.operations.values import Stats
from configs.settings import RunSettings
from learner.training.guards import GuardState
from learner.weights.log import paused_fraction

from .metrics import Totals


def summarise(
    run: RunSettings,
    totals: Totals,
    guards: GuardState,
    stats: Stats,
    evaluations: Sequence[dict[str, Any]],
) -> dict[str, object]:
    """Return the figures of the whole run.

    `generated_tokens` counts the sampled and environment tokens of all trained and dropped
    episodes. `learner_idle_fraction` is the time spent waiting for batches over wall time; both
    run, in each life of the learner, from the moment its first batch was complete until its last
    optimizer step. `learner_idle_for_weights_fraction` is the time that a packed batch waited
    for the weights of the last one to be handed over, over the same span;
    `generation_paused_fraction` is that of all actors' swaps over the time they served.
    """
    paused = paused_fraction(run.folder)
    span_s = totals.busy_span_s
    accuracy = {line["step"]: line["accuracy"] for line in evaluations}
    last = next((line for line in evaluations if line["step"] == run.steps), {})
    by_environment = last.get("environments") if run.environments else None
    return {
        "held_out_accuracy_before": accuracy.get(0),
        "held_out_accuracy_after": accuracy.get(run.steps),
        "held_out_accuracy_by_environment": {
            name: figures.get("accuracy") for name, figures in (by_environment or {}).items()
        },
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
