"""An actor's page of `/metrics`: what this incarnation samples, and how it gets its weights."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from actors.engine.engine import Engine
from actors.weights.counters import WeightCounters
from configs.metrics import CARD_METRICS, LOOP_STALLED_S, Cards, Health, Metric, Pulse, Value
from configs.metrics_serving import serving
from configs.settings import Settings

from .loop import ActorLoop, ActorPhase

TOKENS = Metric("nyala_actor_sampled_tokens_total", "counter", "tokens", "Sampled tokens.")
FINISHED = Metric(
    "nyala_actor_finished_episodes_total", "counter", "episodes", "Episodes with their reward."
)
LOST = Metric("nyala_actor_lost_leases_total", "counter", "leases", "Leases lost to another actor.")
BUSY = Metric(
    "nyala_actor_engine_busy_seconds_total",
    "counter",
    "s",
    "Time in which the engine had episodes; its rate is the actor's utilisation.",
)
ACTIVE = Metric(
    "nyala_actor_active_episodes", "gauge", "episodes", "Episodes begun and not yet finished."
)
ROOM = Metric(
    "nyala_actor_most_episodes",
    "gauge",
    "episodes",
    "Most episodes at a time; it changes with `actors.max_concurrent_episodes: auto`.",
)
UNACKNOWLEDGED = Metric(
    "nyala_actor_unacknowledged_episodes",
    "gauge",
    "episodes",
    "Finished episodes that the broker has not acknowledged.",
)
LINEAGE = Metric(
    "nyala_actor_policy_lineage", "gauge", "1", "Lineage of the version that the engine serves."
)
STEP = Metric("nyala_actor_policy_step", "gauge", "batches", "Step of the version served.")
PROBE = Metric(
    "nyala_actor_probe_difference_nats",
    "gauge",
    "nats",
    "Largest difference of the engine's log-probs from the learner's at the last swap.",
)
OF_WEIGHTS = {
    "updates": Metric(
        "nyala_actor_weight_updates_total", "counter", "versions", "Swaps whose probe agreed."
    ),
    "transfer_s": Metric(
        "nyala_actor_weight_transfer_seconds_total",
        "counter",
        "s",
        "Time from announcements to staged bytes; sampling goes on meanwhile.",
    ),
    "pause_s": Metric(
        "nyala_actor_weight_pause_seconds_total", "counter", "s", "Time paused for swaps."
    ),
    "pulled_bytes": Metric(
        "nyala_actor_weight_pulled_bytes_total", "counter", "bytes", "Bytes of weights pulled."
    ),
    "digest_mismatches": Metric(
        "nyala_actor_weight_digest_mismatches_total",
        "counter",
        "versions",
        "Versions that arrived damaged.",
    ),
    "probe_mismatches": Metric(
        "nyala_actor_weight_probe_mismatches_total",
        "counter",
        "versions",
        "Swaps after which the engine disagreed with the learner.",
    ),
}
"""Metrics that are a counter of the weight receiver, by its name there."""

METRICS = (
    *(TOKENS, FINISHED, LOST, BUSY, ACTIVE, ROOM, UNACKNOWLEDGED, LINEAGE, STEP, PROBE),
    *OF_WEIGHTS.values(),
    *CARD_METRICS,
)


class Receiver(Protocol):
    """The part of `WeightReceiver` that a page shows."""

    is_dirty: bool

    @property
    def counters(self) -> WeightCounters: ...


class ActorPage:
    """Figures and health of one incarnation; read from the threads of the HTTP server."""

    def __init__(
        self, loop: ActorLoop, engine: Engine, receiver: Receiver, settings: Settings
    ) -> None:
        self._loop, self._engine, self._receiver = loop, engine, receiver
        self._timeout_s = settings.broker.heartbeat_timeout_s
        self._cards = Cards()
        self.pulse = Pulse(LOOP_STALLED_S)
        """Beats with the event loop."""
        self.health = Health(self.pulse, self._waits_for)

    def serving(self, settings: Settings, *, name: str) -> AbstractContextManager[None]:
        """Serve the page while a body runs, where the settings ask for it.

        Raises:
            SettingsError: `actors.metrics_endpoint` cannot be listened on.
        """
        return serving(
            settings.actors.metrics_endpoint,
            METRICS,
            self.values,
            self.health,
            run=settings.run,
            role="actors",
            name=name,
        )

    def values(self) -> dict[str, Value | None]:
        """Return the values of `METRICS` now, by name; None = there is no value yet."""
        totals, counters = self._loop.sampling.totals(), self._receiver.counters
        version = self._engine.version
        return {
            TOKENS.name: totals.tokens,
            FINISHED.name: totals.finished,
            LOST.name: totals.lost,
            BUSY.name: self._loop.sampling.busy.seconds,
            ACTIVE.name: totals.in_flight,
            ROOM.name: self._loop.room.most,
            UNACKNOWLEDGED.name: totals.unacked,
            LINEAGE.name: version.lineage,
            STEP.name: version.step,
            PROBE.name: counters.probe_max,
            **self._cards.values(),
            **{metric.name: getattr(counters, name) for name, metric in OF_WEIGHTS.items()},
        }

    def _waits_for(self) -> str | None:
        loop = self._loop
        if loop.phase is not ActorPhase.SERVING:
            return {ActorPhase.JOIN: "its start", ActorPhase.SYNC: "its first weights"}.get(
                loop.phase, "its end"
            )
        if self._receiver.is_dirty:
            return "weights"
        if loop.heartbeat.silent_s > self._timeout_s:
            return "the broker"
        totals = loop.sampling.totals()
        return "its first tokens" if totals.in_flight and not totals.tokens else None
