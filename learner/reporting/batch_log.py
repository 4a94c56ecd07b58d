"""The log of trained batches: a line of `batches.jsonl` and one of `metrics.jsonl` for each.

Owns the totals of the run, and which alerts have been logged. Rank 0 alone has one.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import structlog

from buffer.record.episode import Episode
from configs.errors import BudgetSpent
from configs.fleet import cost, overspent
from configs.machine import UsageMeter
from configs.settings import FleetSettings
from configs.traces import trace_batch
from learner.data.claims import ClaimedBatch
from learner.data.grades import ACCURACY
from learner.data.group_filter import DropCounts
from learner.data.policy_lag import FreshTokens
from learner.training.guards import Alert
from learner.training.step import TrainedBatch

from .advice.advisor_thread import AdvisorThread
from .journal import Journal
from .metrics import BatchFigures, StepTimes, Totals, batch_figures, environment_figures
from .trackers.tracking import Tracking

# --------------------------------------------------------------------------------------------------
# One number for all that a batch is trained on, to compare two runs by (`docs/same-again.md`).


def batch_digest(episodes: Sequence[Episode]) -> str:
    """Hash tasks, tokens, log-probs, masks and rewards, in the order in which they are trained."""
    digest = hashlib.blake2b(digest_size=16)
    for episode in episodes:
        completion = episode.completion
        length = len(completion.token_ids)
        digest.update(f"{episode.task_id} {length} {episode.reward.hex()}\n".encode())
        digest.update(episode.prompt_ids.tobytes())
        digest.update(completion.token_ids.tobytes())
        digest.update(completion.behaviour_logprobs.tobytes())
        digest.update(completion.loss_mask.tobytes())
        if completion.branches:
            digest.update(f"{[tuple(branch) for branch in completion.branches]}".encode())
    return digest.hexdigest()


# --------------------------------------------------------------------------------------------------
# The log of trained batches: a line of `batches.jsonl` and one of `metrics.jsonl` for each.

log = structlog.get_logger()


class BatchLog:
    """Counts the batches of one life of the learner, and writes their lines."""

    def __init__(
        self,
        journal: Journal,
        dropped: DropCounts,
        *,
        lineage: int,
        lineages: dict[int, int],
        totals: Totals,
        environment_of: Callable[[int], str],
        advisor: AdvisorThread,
        tracking: Tracking,
        fleet: FleetSettings,
    ) -> None:
        """Continue the counts of a checkpoint.

        Args:
            journal: Journal to which lines are appended.
            dropped: Counts of dropped groups; read at each batch.
            lineage: Lineage of the learner.
            lineages: lineage -> step it forked at.
            totals: Totals of the run so far; copied.
            environment_of: Returns the name of a group's environment.
            advisor: Judges each batch; its advice and the number of actors that it wants go into
                the lines.
            tracking: Delivers the lines to trackers.
            fleet: Settings of price and budget.
        """
        self._journal, self._advisor, self._tracking = journal, advisor, tracking
        self._dropped, self._fleet = dropped, fleet
        self._lineage = lineage
        self._lineages = lineages
        self._environment_of = environment_of
        self.totals = replace(totals)
        self._counted_from: float | None = None
        self._began = time.monotonic()
        self._alerts: set[str] = set()
        self._overspent: str | None = None
        self._usage = UsageMeter()

    def record(
        self,
        batch: ClaimedBatch,
        trained: TrainedBatch,
        times: StepTimes,
        alerts: Sequence[Alert],
        *,
        claimed_at: float,
        beside: Mapping[str, float],
    ) -> Mapping[str, object]:
        """Count a batch and append its lines to the journal; returns that of `metrics.jsonl`."""
        figures = batch_figures(
            batch.episodes,
            step=batch.step,
            lineage=self._lineage,
            lineages=self._lineages,
            uses=batch.uses,
        )
        self._count(batch.tokens, figures, trained, times, claimed_at=claimed_at)
        self._trace(batch, claimed_at=claimed_at)
        alerts = [*alerts, *_missing_parts(batch), *self._tracking.alerts()]
        self._log_alerts(batch.step, alerts)
        self._advisor.see(
            batch,
            trained,
            figures,
            seconds=times.measured.seconds,
            dropped=self._dropped.units,
        )
        version = {"step": batch.step, "lineage": self._lineage}
        groups = {
            "group_ids": sorted({e.group_id for e in batch.episodes} - batch.uses.keys()),
            "reused_group_ids": sorted(batch.uses),
        }
        digest = {"digest": batch_digest(batch.episodes)} if batch.in_order else {}
        self._journal.append("batches", {**version, **groups, **digest})
        line = {
            **version,
            "time": time.time(),
            "is_replay": batch.is_replay,
            **asdict(figures),
            **batch.tokens.figures(),
            "environments": environment_figures(batch.episodes, self._environment_of),
            **training_figures(trained),
            "alerts": [alert.name for alert in alerts],
            "advice": self.advice,
            **self._fleet_figures(),
            **beside,
            **times.figures(trained_tokens=figures.trained_tokens),
            "idle_fraction": self.totals.idle_fraction,
            "wall_s": round(self.totals.wall_s, 3),
            "filtered_groups": batch.filtered_groups,
            "dropped_groups": dict(self._dropped.units),
            "dropped_by_length": dict(self._dropped.episodes_by_length),
        }
        self._journal.append("metrics", line)
        self._tracking.wake()
        return line

    def evaluated(self, reward: float) -> None:
        """Take the mean reward of the greedy answers of an evaluation."""
        self._advisor.evaluated(reward)

    @property
    def advice(self) -> list[dict[str, str]]:
        """The advice that holds now: `rule` and `text` of each."""
        return [asdict(advice) for advice in self._advisor.advice]

    @property
    def is_budget_spent(self) -> bool:
        """Whether the actors have cost the whole budget, with the time since the last batch."""
        if self._overspent is None:
            since_s = time.monotonic() - self._began
            actor_s = self.totals.actor_s + self._advisor.fleet.present * since_s
            self._overspent = overspent(self._fleet, actor_s)
        return self._overspent is not None

    def check_budget(self) -> None:
        """Raise an error once the budget is spent.

        Raises:
            BudgetSpent: The actors have cost what they may.
        """
        if self._overspent is not None:
            raise BudgetSpent(self._overspent)

    def summary(self, evaluations: Sequence[Mapping[str, Any]]) -> dict[str, object]:
        """Return the advice, and what the run has cost where actors have a price."""
        return {"advice": self.advice, **_costs(self._fleet, self.totals, evaluations)}

    def start(self) -> None:
        """Start the threads of advice and of delivery."""
        self._advisor.start()
        self._tracking.start()

    def finish_totals(self) -> None:
        """Count the time since the last batch, and end the thread of advice: the run has finished.

        The thread may judge the batches that wait for 20 s more.
        """
        since_s = time.monotonic() - self._began
        self.totals.wall_s += since_s
        self.totals.actor_s += self._advisor.fleet.present * since_s
        self._advisor.close()

    def deliver(self, *, until: Callable[[], bool]) -> None:
        """Deliver the end of a finished run to trackers; waits until `until` at most."""
        self._tracking.finish(until=until)

    def close(self) -> None:
        """End the threads that run beside training."""
        self._advisor.close()
        self._tracking.close()

    def _count(
        self,
        tokens: FreshTokens,
        figures: BatchFigures,
        trained: TrainedBatch,
        times: StepTimes,
        *,
        claimed_at: float,
    ) -> None:
        """Add to the totals; the wait for a life's first batch is start-up, not idleness."""
        totals, now = self.totals, time.monotonic()
        totals.fresh_tokens += tokens
        totals.add(
            figures,
            skipped=trained.outcome.skipped_steps,
            skipped_for_loss=trained.outcome.skipped_for_loss,
        )
        if self._counted_from is None:
            self._counted_from = claimed_at
        else:
            totals.idle_s += times.measured.seconds["wait"]
            totals.weights_s += times.measured.seconds["gather"]
        totals.busy_span_s += now - self._counted_from
        self._counted_from = now
        totals.wall_s += now - self._began
        totals.actor_s += self._advisor.fleet.present * (now - self._began)
        self._began = now

    def _trace(self, batch: ClaimedBatch, *, claimed_at: float) -> None:
        trace_batch(
            (episode.task_id for episode in batch.episodes),
            lineage=self._lineage,
            step=batch.step,
            took_s=time.monotonic() - claimed_at,
            is_replay=batch.is_replay,
        )

    def _fleet_figures(self) -> dict[str, object]:
        fleet, wanted = self._advisor.fleet, self._advisor.fleet.wanted
        used = self._usage.read_usage()
        return {
            "actors": fleet.present,
            "actors_wanted": wanted.actors,
            "actors_wanted_why": wanted.reason,
            "actor_hours": round(self.totals.actor_s / 3600, 4),
            "cost": cost(self._fleet, self.totals.actor_s),
            "learner_memory_gib": round(used.memory_bytes / 2**30, 3),
            "learner_cores": round(used.cores, 3),
            "actor_memory_gib": round(fleet.largest_bytes / 2**30, 3),
            "actor_cores": round(fleet.cores, 3),
        }

    def _log_alerts(self, step: int, alerts: Sequence[Alert]) -> None:
        """Warn of an alert in the first of several batches in a row, and of each rollback."""
        for alert in alerts:
            if alert.name not in self._alerts or alert.name == "rollback":
                log.warning("ALERT", alert=alert.name, step=step, why=alert.text)
        self._alerts = {alert.name for alert in alerts}


def training_figures(trained: TrainedBatch) -> dict[str, object]:
    """Return the figures of a batch's optimizer steps by their names in `metrics.jsonl`."""
    return {
        **asdict(trained.divergence),
        **asdict(trained.outcome),
        **({} if trained.critic is None else asdict(trained.critic)),
        "loss": trained.loss,
        "kl_coefficient": trained.kl_coefficient,
        "entropy_bonus": trained.entropy_bonus,
    }


def _costs(
    fleet: FleetSettings, totals: Totals, evaluations: Sequence[Mapping[str, Any]]
) -> dict[str, object]:
    spent = cost(fleet, totals.actor_s)
    if spent is None:
        return {}
    right = [line[ACCURACY] for line in evaluations if line.get(ACCURACY) is not None]
    gained = right[-1] - right[0] if right else 0.0
    tokens = totals.trained_tokens / 1e6
    return {
        "actor_hours": round(totals.actor_s / 3600, 4),
        "cost": round(spent, 4),
        "cost_per_million_trained_tokens": round(spent / tokens, 4) if tokens else None,
        "cost_per_point_of_accuracy": round(spent / (100 * gained), 4) if gained > 0 else None,
    }


def _missing_parts(batch: ClaimedBatch) -> list[Alert]:
    if not batch.missing_parts:
        return []
    why = (
        f"rewards.weights must name parts of the reward, got {', '.join(batch.missing_parts)}, "
        "which no episode of the batch has; correct the names, or return such parts: the batch "
        "was trained with 0 for them"
    )
    return [Alert("reward_part_missing", why)]
