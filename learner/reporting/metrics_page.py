"""The learner's page of `/metrics`: what rank 0 has trained, evaluated and published.

Counts begin with this life of the learner. The training thread and the thread that watches the
publisher hand over their figures; the page is made from them when it is requested.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from configs.metrics import CARD_METRICS, SECONDS, Cards, Health, Histogram, Metric, Pulse, Value
from configs.metrics_serving import serving
from configs.settings import Settings
from learner.data.evaluation import EvaluationResult
from learner.phase_names import PHASES
from learner.weights.log import VersionDelivery

from .figures import FIGURES, Figure

OF_FIGURES = tuple((figure, figure.prometheus) for figure in FIGURES if figure.prometheus)
"""Metrics that are a figure of `metrics.jsonl`."""
SUMMED = tuple(
    (figure.key, metric)
    for figure, metric in OF_FIGURES
    if metric.kind == "counter" and not figure.is_total
)
"""Counters among them, which add up a value of each batch; the rest show the last line's value."""

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
SCORE = Metric(
    "nyala_learner_held_out_score",
    "gauge",
    "1",
    "Held-out score of the last evaluation, by what `run.eval_metric` chooses.",
    label="environment",
)
HELD_OUT_REWARD = Metric(
    "nyala_learner_held_out_reward",
    "gauge",
    "reward",
    "Mean reward of held-out answers in the last evaluation.",
    label="environment",
)
PUBLISHED = Metric(
    "nyala_learner_published_versions_total", "counter", "versions", "Versions that were delivered."
)
PUBLISH = Metric(
    "nyala_learner_publish_seconds",
    "histogram",
    "s",
    "Time from the announcement of a version to the last confirmation; only for weight groups.",
)

METRICS = (
    *(metric for figure, metric in OF_FIGURES if not (metric.label or figure.is_total)),
    *CARD_METRICS,
    *(BATCHES, STEP, PHASE),
    *(metric for figure, metric in OF_FIGURES if metric.label or figure.is_total),
    *(SCORE, HELD_OUT_REWARD, PUBLISHED, PUBLISH),
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
        self._cards = Cards()
        self._last: Mapping[str, Any] = {}
        self._sums = {key: 0 for key, metric in SUMMED if not metric.label}
        self._names = {key: Counter[str]() for key, metric in SUMMED if metric.label}
        self._steps = Histogram(SECONDS)
        self._phases = dict.fromkeys(PHASES, 0.0)
        self._evaluated: Mapping[str, Mapping[str, Any]] = {}
        self._publishes = Histogram(SECONDS)
        self._published = 0

    def serving(self, settings: Settings, *, is_first: bool) -> AbstractContextManager[None]:
        """Serve the page while a body runs, on rank 0 and where the settings ask for it.

        Raises:
            SettingsError: The address cannot be listened on.
        """
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
        for key in self._sums:
            self._sums[key] += line[key]
        for key, names in self._names.items():
            names.update(line[key])
        seconds = {name: line[f"{name}_s"] for name in PHASES}
        for name, spent_s in seconds.items():
            self._phases[name] += spent_s
        self._steps.observe(sum(seconds.values()) - seconds["wait"])
        self._last = line

    def evaluated(self, evaluation: EvaluationResult) -> None:
        """Take over the result of an evaluation."""
        self._evaluated = evaluation.environments

    def delivered(self, sent: VersionDelivery) -> None:
        """Count the delivery of a version."""
        self._published += 1
        if sent.members:
            self._publishes.observe(sent.wall_s)

    def values(self) -> dict[str, Value | None]:
        """Return the values of `METRICS` now."""
        return {
            **{metric.name: self._value(figure, metric) for figure, metric in OF_FIGURES},
            **self._cards.values(),
            BATCHES.name: sum(self._steps.counts),
            STEP.name: self._steps,
            PHASE.name: self._phases,
            SCORE.name: self._of_evaluation("score"),
            HELD_OUT_REWARD.name: self._of_evaluation("reward"),
            PUBLISHED.name: self._published,
            PUBLISH.name: self._publishes,
        }

    def _of_evaluation(self, key: str) -> dict[str, float]:
        return {name: figures[key] for name, figures in self._evaluated.items() if key in figures}

    def _value(self, figure: Figure, metric: Metric) -> Value | None:
        if figure.key in self._sums:
            return self._sums[figure.key]
        if figure.key in self._names:
            return self._names[figure.key]
        value: Value | None = self._last.get(figure.key)
        if value is None and metric.kind == "counter":
            return {} if metric.label else 0
        return value
