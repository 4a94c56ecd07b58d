"""The learner's loop: claim -> train -> advance -> publish -> write down -> checkpoint -> commit.

Consumes sealed claims. Waits for episodes, and at the very end for the last evaluation; never for
an actor, a transfer of weights or an evaluation in between. All ranks run the same loop: rank 0
talks to the store, decides and tells the others what comes next.
"""

from __future__ import annotations

import threading
import time
from dataclasses import asdict, dataclass, replace
from typing import Protocol

import structlog
from torch import nn

from buffer import operations
from buffer.episode import Episode, PolicyVersion
from configs.loader import settings_hash
from configs.logging import bind_version
from configs.settings import Settings

from .batch import BatchPlan, Microbatch, pack, plan_batch
from .checkpoint import Checkpoints, LearnerState
from .claims import ClaimedBatch
from .critic import Critic
from .crowding import Crowding
from .evaluation import is_due
from .finish import save_model, summarise
from .front import Front
from .ledger import Ledger
from .metrics import BatchFigures, StepTimes, batch_figures
from .model import Policy
from .optimizer import AdamWithSchedule
from .patience import PatientStore
from .ranks import Ranks
from .records import Records
from .resume import Opening
from .step import TrainedBatch, train_batch

log = structlog.get_logger()

KEEPALIVE_S = 5.0  # other ranks hear from rank 0 this often while it waits for episodes
WAIT, STOP = b"", b"stop"


class Publisher(Protocol):
    """Where new weights go; `weights.py` has the real one."""

    def publish(self, model: nn.Module, version: PolicyVersion) -> object:
        """Hand the weights over and return without waiting for any actor; every rank calls it."""
        ...


@dataclass(frozen=True, slots=True)
class Parts:
    """What a life of the learner is made of, on every rank."""

    settings: Settings
    ranks: Ranks
    store: PatientStore
    policy: Policy
    optimizer: AdamWithSchedule
    checkpoints: Checkpoints
    publisher: Publisher
    opening: Opening
    ledger: Ledger | None
    """On rank 0."""
    critic: Critic | None = None
    """What values the policy's states, where `algorithm.advantage` asks for it."""


class Loop:
    """One life of the learner, from its opening to the end of the run or a request to stop."""

    def __init__(self, parts: Parts, stopping: threading.Event) -> None:
        self._parts = parts
        self._stopping = stopping
        self._run = parts.settings.run
        self._lineage = parts.opening.lineage
        self._lineages = parts.opening.lineages
        self._step = parts.opening.state.step
        self._totals = replace(parts.opening.state.totals)
        self._checkpointed: int | None = self._step if parts.opening.checkpoint else None
        self._front: Front | None = None
        self._recoveries = parts.store.recoveries
        if parts.ledger is not None:
            self._front = Front(
                parts.settings,
                parts.store,
                parts.opening,
                ledger=parts.ledger,
                vocabulary=parts.policy.vocabulary,
            )
        self._records = Records(parts.store, parts.settings)
        self._crowding = Crowding(parts.store, parts.settings.buffer)
        self._counted_from: float | None = None
        self._began = time.monotonic()

    def run(self) -> bool:
        """Train until the run is done; False if asked to stop before.

        Raises:
            LostLineage: A newer learner owns the run.
            StoreError: The store refused, or was away for too long.
        """
        self._publish()
        if self._front is not None:
            self._front.start(self._step)
        try:
            while self._step < self._run.steps:
                if not self._train_next():
                    self._checkpoint()
                    return False
            return self._finish()
        finally:
            if self._front is not None:
                self._front.feeder.stop()

    def _train_next(self) -> bool:
        """Train one batch; False if asked to stop while waiting for it."""
        parts, began = self._parts, time.monotonic()
        batch, plan = self._next_batch(self._step + 1)
        if plan is None:
            return False
        claimed = time.monotonic()
        microbatches = self._pack(plan, batch)
        packed = time.monotonic()
        trained = train_batch(
            parts.policy,
            parts.optimizer,
            plan.step,
            microbatches,
            settings=parts.settings.algorithm,
            ranks=parts.ranks,
            critic=parts.critic,
        )
        stepped = time.monotonic()
        self._step = plan.step
        self._hand_on()
        if batch is not None:
            times = StepTimes(
                wait_s=round(claimed - began, 4),
                pack_s=round(packed - claimed, 4),
                train_s=round(stepped - packed, 4),
                publish_s=round(time.monotonic() - stepped, 4),
            )
            self._write_down(batch, trained, times, claimed_at=claimed)
        if self._step % parts.settings.learner.checkpoint_every == 0 or self._is_urgent():
            self._checkpoint()
        if self._front is not None:
            self._front.after_step(self._step)
        return True

    def _hand_on(self) -> None:
        """Say that the batch is trained, and publish what came of it."""
        if self._front is not None:
            self._front.ledger.step = self._step
            self._parts.store.run(operations.advance(self._lineage, self._step))
        # An evaluation waits for actors that have exactly these weights, or newer ones.
        every = self._parts.settings.learner.publish_every
        if self._step % every == 0 or is_due(self._run, self._step):
            self._publish()

    def _is_urgent(self) -> bool:
        """Whether to checkpoint before it is due; every rank calls it.

        Either Redis is crowded with records of trained batches, or it lost writes since the last
        checkpoint: it was told of batches whose records it may not have, so a new life could not
        train them again.
        """
        answer = None
        if self._front is not None:
            is_crowded = self._crowding.is_crowded(self._step)
            was_rewound = self._parts.store.recoveries != self._recoveries
            answer = b"yes" if is_crowded or was_rewound else b"no"
        return self._parts.ranks.broadcast(answer) == b"yes"

    def _next_batch(self, step: int) -> tuple[ClaimedBatch | None, BatchPlan | None]:
        """Wait for batch `step`; no plan means stop. Only rank 0 gets the episodes."""
        ranks = self._parts.ranks
        batch = None
        while True:
            directive = None
            if self._front is not None:
                batch = self._front.wait(step, self._stopping, KEEPALIVE_S)
                directive = WAIT
                if batch is not None:
                    directive = self._plan(batch).encode()
                elif self._stopping.is_set():
                    directive = STOP
            directive = ranks.broadcast(directive)
            if directive == STOP:
                return None, None
            if directive != WAIT:
                return batch, BatchPlan.decode(directive)

    def _plan(self, batch: ClaimedBatch) -> BatchPlan:
        return plan_batch(
            batch.step,
            batch.episodes,
            ranks=self._parts.ranks.size,
            settings=self._parts.settings.algorithm,
            max_completion_tokens=self._run.max_completion_tokens,
            num_minibatches=self._parts.settings.algorithm.num_minibatches,
        )

    def _pack(self, plan: BatchPlan, batch: ClaimedBatch | None) -> list[Microbatch]:
        return pack(
            plan,
            self._own_episodes(plan, batch),
            settings=self._parts.settings.algorithm,
            microbatch_tokens=self._parts.settings.learner.microbatch_tokens,
            lineages=self._lineages,
            lineage=self._lineage,
        )

    def _own_episodes(self, plan: BatchPlan, batch: ClaimedBatch | None) -> list[Episode]:
        """This rank's share: rank 0 has already read all, the others fetch theirs."""
        own = [row.task_id for row in plan.rows if row.rank == self._parts.ranks.rank]
        if batch is not None:
            by_id = {episode.task_id: episode for episode in batch.episodes}
            return [by_id[task_id] for task_id in own]
        return self._records.episodes(own)

    def _publish(self) -> None:
        version = PolicyVersion(self._lineage, self._step)
        self._parts.publisher.publish(self._parts.policy.causal_lm, version)
        bind_version(f"{version.lineage}.{version.step}")

    def _write_down(
        self, batch: ClaimedBatch, trained: TrainedBatch, times: StepTimes, *, claimed_at: float
    ) -> None:
        """Count the batch and append its lines to the journal."""
        assert self._front is not None
        figures = batch_figures(
            batch.episodes,
            step=batch.step,
            lineage=self._lineage,
            lineages=self._lineages,
            uses=batch.uses,
        )
        self._count(figures, trained, times, claimed_at=claimed_at)
        version = {"step": batch.step, "lineage": self._lineage}
        groups = sorted({episode.group_id for episode in batch.episodes} - batch.uses.keys())
        reused = sorted(batch.uses)
        self._front.journal.append(
            "batches", {**version, "group_ids": groups, "reused_group_ids": reused}
        )
        self._front.journal.append(
            "metrics",
            {
                **version,
                "time": time.time(),
                "is_replay": batch.is_replay,
                **asdict(figures),
                **asdict(trained.divergence),
                **asdict(trained.outcome),
                **({} if trained.critic is None else asdict(trained.critic)),
                "loss": trained.loss,
                **asdict(times),
                "idle_fraction": self._totals.idle_fraction,
                "wall_s": round(self._totals.wall_s, 3),
                "filtered_groups": batch.filtered_groups,
                "dropped_groups": dict(self._front.claims.dropped.units),
            },
        )

    def _count(
        self, figures: BatchFigures, trained: TrainedBatch, times: StepTimes, *, claimed_at: float
    ) -> None:
        """Add to the totals; the wait for a life's first batch is start-up, not idleness."""
        totals, now = self._totals, time.monotonic()
        totals.add(figures, skipped=trained.outcome.skipped_steps)
        if self._counted_from is None:
            self._counted_from = claimed_at
        else:
            totals.idle_s += times.wait_s
        totals.busy_span_s += now - self._counted_from
        self._counted_from = now
        totals.wall_s += now - self._began
        self._began = now

    def _checkpoint(self) -> None:
        """Checkpoint, then COMMIT; nothing if this step already is."""
        if self._checkpointed == self._step or not self._step:
            return
        began = time.monotonic()
        parts, front = self._parts, self._front
        recoveries = parts.store.recoveries
        if front is not None:
            self._totals.dropped_tokens += front.take_dropped_tokens()
        state = LearnerState(
            run=self._run.name,
            settings_hash=settings_hash(parts.settings),
            step=self._step,
            lineage=self._lineage,
            cursor=front.feeder.cursor if front is not None else 0,
            trained=front.trained_groups(self._step) if front is not None else (),
            totals=self._totals,
        )
        parts.checkpoints.save(state, parts.policy, parts.optimizer)
        self._checkpointed = self._step
        self._recoveries = recoveries
        if front is not None:
            with parts.store.calm():
                front.ledger.checkpoint(self._step)
            committed = parts.store.run(operations.commit(self._lineage, self._step))
            self._crowding.committed(self._step)
            self._records.sweep()
            took_s = round(time.monotonic() - began, 3)
            log.info("checkpoint", step=self._step, committed_tasks=committed, took_s=took_s)

    def _finish(self) -> bool:
        """End the run: model, last evaluation, CANCEL, summary; False if asked to stop before."""
        self._checkpoint()
        run, front = self._run, self._front
        save_model(self._parts.policy, run, run.folder / "model", self._parts.ranks)
        if front is None:
            return True
        front.feeder.stop()
        front.evaluations.finish(until=self._stopping.is_set)
        if self._stopping.is_set() and not front.is_evaluated(run.steps):
            return False
        cancelled = self._parts.store.run(operations.cancel(self._lineage))
        self._parts.store.run(operations.clear_replay(self._lineage))
        self._records.sweep(older_than_s=0.0)
        stats = self._parts.store.run(operations.stats())
        self._totals.wall_s += time.monotonic() - self._began
        front.journal.summarise(summarise(run, self._totals, stats, front.journal.lines("eval")))
        log.info("finished", steps=run.steps, cancelled_tasks=cancelled)
        return True
