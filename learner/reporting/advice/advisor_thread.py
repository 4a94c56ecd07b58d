"""Rank 0's thread that judges batches for advice, and counts the actors that the run wants.

Consumes a short queue of batches. A batch that finds it full is left out: rules pool many. The
advice that a line of metrics has is that of the batches judged by then, most often all before it.
"""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import structlog
import torch

from buffer import operations
from buffer.operations.values import ActorSeen
from configs.fleet import Meter, WantedActors, first_wanted, next_wanted
from configs.settings import Settings
from configs.worker import Worker
from learner.data.claims import ClaimedBatch
from learner.data.retrying_store import RetryingStore
from learner.reporting.metrics import BatchFigures
from learner.training.step import TrainedBatch

from .advisor import Advisor
from .evidence import Advice, Evidence, StoreFigures
from .gathering import Vocabulary, evidence_of

# --------------------------------------------------------------------------------------------------
# The number of actors that the run wants, kept up to date beside training.


class FleetWatch:
    """Measures how many actors the run needs, from the store's actors and the times of batches.

    One thread calls it; others read `wanted` and `present`, which are replaced as wholes.

    Args:
        settings: Settings of the run.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._meter = Meter()
        self.wanted: WantedActors = first_wanted(settings)
        """The newest number."""
        self.present = 0
        """Actors that were heard of lately, with weights or not."""
        self.cores = self.largest_bytes = 0.0
        """Processor seconds in each second of all of them, and the memory of the largest."""

    def observe_actors(self, now_s: float, actors: Iterable[ActorSeen]) -> None:
        """Take the actors that the store shows at one moment."""
        limit_s = self._settings.broker.heartbeat_timeout_s
        heard = [actor for actor in actors if actor.samples(limit_s)]
        self.present = len(heard)
        self.cores = sum(actor.figure("cores") for actor in heard)
        self.largest_bytes = max((actor.figure("memory_bytes") for actor in heard), default=0.0)
        serving = [actor for actor in heard if "version" in actor.fields]
        self._meter.observe_busy_time(
            now_s,
            {actor.incarnation: actor.figure("busy_s") for actor in serving},
            version_s=max(
                (
                    actor.figure("weight_transfer_s") + actor.figure("weight_pause_s")
                    for actor in serving
                ),
                default=0.0,
            ),
        )

    def batch(self, now_s: float, *, wait_s: float, span_s: float) -> None:
        """Take a batch: its wait for episodes, and its time as a whole."""
        measured = self._meter.batch(wait_s=wait_s, span_s=span_s)
        if measured is not None:
            self.wanted = next_wanted(self.wanted, measured, self._settings, now_s=now_s)


# --------------------------------------------------------------------------------------------------
# The thread that advises: gathers evidence, asks the store, judges; training only hands it over.

log = structlog.get_logger()

MOST_WAITING = 4  # batches, whose episodes would else be held in memory
CLOSE_S = 10.0
ASK_EVERY_S = 2.0  # as often as actors report


class MeasuredBatch(NamedTuple):
    """A batch with its measurements. Producer: the thread that trains."""

    batch: ClaimedBatch
    trained: TrainedBatch
    figures: BatchFigures
    wait_s: float
    span_s: float
    dropped: Mapping[str, int]
    """Reason -> groups dropped in this life so far."""


class AdvisorThread:
    """The thread that judges batches and gives advice beside training.

    Args:
        settings: Settings of the run.
        store: Store that is asked for its counts now and then.
        vocabulary: Vocabulary of the model.
    """

    def __init__(self, settings: Settings, store: RetryingStore, vocabulary: Vocabulary) -> None:
        self._advisor = Advisor(settings)
        self._store = store
        self.fleet = FleetWatch(settings)
        """How many actors the run wants."""
        self._vocabulary = vocabulary
        self._counts, self._asked_at = StoreFigures(), -ASK_EVERY_S
        self._greedy_reward: float | None = None
        self._looks, self._workless = 0, 0
        """Since the last batch, as in `Evidence`."""
        self._cards = 0 if settings.learner.device == "cpu" else torch.cuda.device_count()
        self._dropped: Mapping[str, int] = {}
        self._queue: queue.Queue[MeasuredBatch | None] = queue.Queue(MOST_WAITING)
        self._worker = Worker(self._work, name="advice")
        self._is_first = True
        self._step, self._batches, self._cpu_s = 0, 0, 0.0
        self.advice: tuple[Advice, ...] = ()
        """The advice that holds now."""

    def evaluated(self, reward: float) -> None:
        """Take the mean reward of the greedy answers of an evaluation; the first one counts."""
        if self._greedy_reward is None:
            self._greedy_reward = reward

    def start(self) -> None:
        """Start the thread that advises."""
        self._worker.start()

    def see(
        self,
        batch: ClaimedBatch,
        trained: TrainedBatch,
        figures: BatchFigures,
        *,
        seconds: Mapping[str, float],
        dropped: Mapping[str, int],
    ) -> None:
        """Hand a trained batch over to the thread; one that finds the queue full is left out.

        Args:
            batch: The batch with its episodes.
            trained: Figures that training measured.
            figures: Figures of the batch's episodes, as in its line of metrics.
            seconds: Phase -> its seconds.
            dropped: Reason -> groups dropped in this life so far.
        """
        # The first batch of a life waits for everything to start.
        wait_s = 0.0 if self._is_first else seconds["wait"]
        span_s = sum(seconds.values()) - (seconds["wait"] - wait_s)
        self._is_first = False
        if self._worker.is_alive and not self._queue.full():
            self._queue.put_nowait(
                MeasuredBatch(batch, trained, figures, wait_s, span_s, dict(dropped))
            )

    def close(self) -> None:
        """Judge what waits, for `CLOSE_S` at most, and end the thread."""
        if not self._worker.is_alive:
            return
        try:
            self._queue.put(None, timeout=CLOSE_S)
            self._worker.join(CLOSE_S)
        except Exception:  # noqa: BLE001 - it has logged its error, and a run needs no advice
            return
        log.info("advice", batches=self._batches, cpu_s=round(self._cpu_s, 3))

    def _work(self) -> None:
        try:
            self._advise()
        except BaseException:
            self.advice = ()  # advice that held may have ended unnoticed
            for _ in range(MOST_WAITING):
                with suppress(queue.Empty):
                    self._queue.get_nowait()  # else `close` would wait for room
            raise

    def _advise(self) -> None:
        # The store is asked on a clock of its own: at the end of a batch, when the learner has just
        # taken what there was, actors are most often without work.
        while True:
            wait_s = self._asked_at + ASK_EVERY_S - time.monotonic()
            if wait_s <= 0:
                self._consider_store()
                continue
            try:
                seen = self._queue.get(timeout=wait_s)
            except queue.Empty:
                continue
            if seen is None:
                return
            self._step = seen.batch.step
            self._replace_advice(self._advisor.consider(self._evidence(seen)))
            self._batches += 1
            self._cpu_s = time.thread_time()

    def _consider_store(self) -> None:
        self._counts = counts = self._ask_store()
        self._asked_at = time.monotonic()  # not before: batches are judged between two looks
        self._looks += counts.actors > 0
        self._workless += counts.actors > 0 and not counts.leased
        # If nothing is leased, no batch may come.
        self._replace_advice(self._advisor.consider_store(counts))

    def _replace_advice(self, advice: tuple[Advice, ...]) -> None:
        before = {advised.rule for advised in self.advice}
        self.advice = advice
        for advised in advice:
            if advised.rule not in before:
                log.warning("ADVICE", rule=advised.rule, step=self._step, text=advised.text)

    def _evidence(self, seen: MeasuredBatch) -> Evidence:
        batch, tokens, divergence = seen.batch, seen.batch.tokens, seen.trained.divergence
        dropped = {why: n - self._dropped.get(why, 0) for why, n in seen.dropped.items()}
        self._dropped = seen.dropped
        looks, workless = self._looks, self._workless
        self._looks, self._workless = 0, 0
        self.fleet.batch(time.monotonic(), wait_s=seen.wait_s, span_s=seen.span_s)
        return replace(
            evidence_of(batch.step, batch.sampled, seen.figures, self._vocabulary),
            filtered_groups=batch.filtered_groups,
            entropy=divergence.entropy,
            effective_sample_size=divergence.effective_sample_size,
            kl=max(divergence.kl_pi_mu_k3, divergence.kl_mu_pi_k3),
            lag0_tokens=divergence.lag0_tokens,
            lag0_logprob_diff_mean=divergence.lag0_logprob_diff_mean,
            lag0_temperature_excess=divergence.lag0_temperature_excess,
            lag0_temperature_weight=divergence.lag0_temperature_weight,
            clipped=divergence.clip_fraction_low + divergence.clip_fraction_high,
            wait_s=seen.wait_s,
            span_s=seen.span_s,
            dropped={why: n for why, n in dropped.items() if n},
            masked=tokens.masked / max(1, tokens.masked + tokens.trained),
            store=self._counts,
            greedy_reward=self._greedy_reward,
            looks=looks,
            workless=workless,
            cards=self._cards,
            cores=0 if self._cards else len(os.sched_getaffinity(0)),
        )

    def _ask_store(self) -> StoreFigures:
        stats = self._store.run(operations.stats())
        self.fleet.observe_actors(time.monotonic(), self._store.run(operations.actors()))
        death = self._counts.death
        if stats.dead > self._counts.dead and stats.dead > stats.purged:
            newest = operations.dead_letters(stats.dead - stats.purged - 1, 1)
            death = next((letter.why for letter in self._store.run(newest)), death)
        return StoreFigures(
            actors=self.fleet.present,
            leased=stats.leased,
            dead=stats.dead,
            death=death,
            data_failures=stats.data_failures,
            data_failure=stats.data_failure,
            paused=self._store.run(operations.closed()).paused,
        )
