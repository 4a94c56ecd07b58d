"""The learner's page of `/metrics`: what rank 0 has trained, evaluated and published.

Counts begin with this life of the learner. The training thread and the one that watches the
publisher hand over what they have written down; the page is made of it when somebody asks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from configs import metrics
from configs.metrics import SECONDS, Health, Histogram, Metric, Pulse, Value
from configs.metrics_serving import serving
from configs.settings import Settings
from learner.data.evaluation import Evaluation
from learner.phase_names import PHASES
from learner.weights.log import Sent

OF_LAST_BATCH = {
    "step": Metric("nyala_learner_step", "gauge", "batches", "Batches trained in the run."),
    "lineage": Metric("nyala_learner_lineage", "gauge", "1", "Life of the learner, from 1."),
    "loss": Metric("nyala_learner_loss", "gauge", "1", "Loss of the last batch."),
    "grad_norm": Metric(
        "nyala_learner_grad_norm", "gauge", "1", "Largest gradient norm before clipping."
    ),
    "learning_rate": Metric("nyala_learner_learning_rate", "gauge", "1", "Learning rate."),
    "kl_pi_mu_k3": Metric(
        "nyala_learner_kl_nats", "gauge", "nats per token", "KL(pi || mu) of the last batch."
    ),
    "kl_pi_ref_k3": Metric(
        "nyala_learner_reference_kl_nats", "gauge", "nats per token", "KL(pi || reference)."
    ),
    "entropy": Metric("nyala_learner_entropy_nats", "gauge", "nats", "Mean entropy of pi."),
    "ratio_mean": Metric("nyala_learner_ratio_mean", "gauge", "1", "Mean of pi/mu over tokens."),
    "ratio_max": Metric("nyala_learner_ratio_max", "gauge", "1", "Largest pi/mu of a token."),
    "effective_sample_size": Metric(
        "nyala_learner_effective_sample_ratio", "gauge", "0 to 1", "Effective sample size."
    ),
    "clip_fraction_low": Metric(
        "nyala_learner_clipped_low_ratio", "gauge", "0 to 1", "Tokens at the lower clip bound."
    ),
    "clip_fraction_high": Metric(
        "nyala_learner_clipped_high_ratio", "gauge", "0 to 1", "Tokens at the upper clip bound."
    ),
    "reward_mean": Metric("nyala_learner_reward", "gauge", "reward", "Mean reward of the batch."),
    "reward_std": Metric(
        "nyala_learner_reward_std", "gauge", "reward", "Standard deviation of the batch's rewards."
    ),
    "policy_lag_mean": Metric(
        "nyala_learner_policy_lag_mean", "gauge", "batches", "Mean policy lag of trained tokens."
    ),
    "policy_lag_max": Metric(
        "nyala_learner_policy_lag_max", "gauge", "batches", "Largest policy lag of the batch."
    ),
    "response_length_mean": Metric(
        "nyala_learner_response_tokens", "gauge", "tokens", "Mean length of a completion."
    ),
    "response_truncated_fraction": Metric(
        "nyala_learner_truncated_ratio", "gauge", "0 to 1", "Episodes cut off by the token limit."
    ),
    "mfu": Metric(
        "nyala_learner_mfu_ratio", "gauge", "0 to 1", "Use of the cards' peak; where one is stated."
    ),
    "trained_tokens_per_s": Metric(
        "nyala_learner_step_tokens_per_second",
        "gauge",
        "tokens/s",
        "Speed of the last batch's training, without waits.",
    ),
}
"""Metrics that are a figure of the last batch, by its key in `metrics.jsonl`."""

COUNTED = {
    "episodes": Metric("nyala_learner_episodes_total", "counter", "episodes", "Trained episodes."),
    "trained_tokens": Metric(
        "nyala_learner_trained_tokens_total", "counter", "tokens", "Tokens with loss mask 1."
    ),
    "completion_tokens": Metric(
        "nyala_learner_completion_tokens_total",
        "counter",
        "tokens",
        "Completion tokens of trained episodes, those of the environment included.",
    ),
    "skipped_steps": Metric(
        "nyala_learner_skipped_steps_total",
        "counter",
        "optimizer steps",
        "Steps left out because loss or gradient were not finite.",
    ),
}
"""Metrics that are a sum over batches, by the key in `metrics.jsonl`."""

BATCHES = Metric("nyala_learner_batches_total", "counter", "batches", "Batches trained.")
STEP = Metric(
    "nyala_learner_step_seconds",
    "histogram",
    "s",
    "Time of a batch without the wait for its episodes.",
)
PHASE = Metric(
    "nyala_learner_phase_seconds_total",
    "counter",
    "s",
    "Time in each phase of batches; `wait` is the learner's idle time.",
    label="phase",
)
DROPPED = Metric(
    "nyala_learner_dropped_groups_total",
    "counter",
    "groups",
    "Groups dropped when they were claimed.",
    label="reason",
)
ALERTS = Metric(
    "nyala_learner_alerts_total",
    "counter",
    "batches",
    "Batches with this alert (`alerts` in metrics.jsonl).",
    label="alert",
)
SAMPLING_ALARMS = Metric(
    "nyala_learner_sampling_alarms_total", "counter", "alarms", "Times that no actor sampled."
)
ACCURACY = Metric(
    "nyala_learner_accuracy_ratio",
    "gauge",
    "0 to 1",
    "Held-out accuracy of the last evaluation.",
    label="environment",
)
PUBLISHED = Metric(
    "nyala_learner_published_versions_total", "counter", "versions", "Versions that were delivered."
)
PUBLISH = Metric(
    "nyala_learner_publish_seconds",
    "histogram",
    "s",
    "From the announcement of a version to the last confirmation; of weight groups alone.",
)

METRICS = (
    *OF_LAST_BATCH.values(),
    *COUNTED.values(),
    *metrics.METRICS,
    *(BATCHES, STEP, PHASE, DROPPED, ALERTS, SAMPLING_ALARMS, ACCURACY, PUBLISHED, PUBLISH),
)


class LearnerPage:
    """Figures of this life of the learner, and its health.

    Args:
        limit_s: Longest time without a turn of the loop; a batch and a save must fit in.
    """

    def __init__(self, *, limit_s: float) -> None:
        self.pulse = Pulse(limit_s)
        """Beats from the first wait for a batch on."""
        self.health = Health(self.pulse, lambda: None if self.pulse.has_begun else "its start")
        self._cards = metrics.Cards()
        self._last: Mapping[str, Any] = {}
        self._counts = dict.fromkeys(COUNTED, 0)
        self._steps = Histogram(SECONDS)
        self._phases = dict.fromkeys(PHASES, 0.0)
        self._alerts: Counter[str] = Counter()
        self._accuracy: dict[str, float] = {}
        self._publishes = Histogram(SECONDS)
        self._published = 0

    def serving(self, settings: Settings, *, is_first: bool) -> AbstractContextManager[None]:
        """Serve the page while a body runs, on rank 0 and where the settings ask for it."""
        return serving(
            settings.learner.metrics_endpoint if is_first else None,
            METRICS,
            self.values,
            self.health,
            run=settings.run,
            role="learner",
            name="learner",
        )

    def trained(self, line: Mapping[str, Any]) -> None:
        """Take over a line of `metrics.jsonl`."""
        for key in COUNTED:
            self._counts[key] += line[key]
        seconds = {name: line[f"{name}_s"] for name in PHASES}
        for name, spent_s in seconds.items():
            self._phases[name] += spent_s
        self._steps.observe(sum(seconds.values()) - seconds["wait"])
        self._alerts.update(line["alerts"])
        self._last = line

    def evaluated(self, evaluation: Evaluation) -> None:
        """Take over the result of an evaluation."""
        by_name = evaluation.environments
        self._accuracy = {
            name: figures["accuracy"] for name, figures in by_name.items() if "accuracy" in figures
        }

    def delivered(self, sent: Sent) -> None:
        """Count the delivery of a version."""
        self._published += 1
        if sent.members:
            self._publishes.observe(sent.wall_s)

    def values(self) -> dict[str, Value | None]:
        """Return the values of `METRICS` now."""
        last = self._last
        return {
            **{metric.name: last.get(key) for key, metric in OF_LAST_BATCH.items()},
            **{metric.name: self._counts[key] for key, metric in COUNTED.items()},
            **self._cards.values(),
            BATCHES.name: sum(self._steps.counts),
            STEP.name: self._steps,
            PHASE.name: self._phases,
            DROPPED.name: last.get("dropped_groups", {}),
            ALERTS.name: self._alerts,
            SAMPLING_ALARMS.name: last.get("sampling_alarms", 0),
            ACCURACY.name: self._accuracy,
            PUBLISHED.name: self._published,
            PUBLISH.name: self._publishes,
        }
