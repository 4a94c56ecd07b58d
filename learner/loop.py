"""The learner's loop: claim -> train -> guard -> advance -> publish -> write down -> checkpoint.

Publishing runs beside what follows it until the model is needed again (`background_publish.py`).

Consumes sealed claims. Waits for episodes, and at the very end for the last evaluation; never for
an actor, a transfer of weights or an evaluation in between. All ranks run the same loop: rank 0
talks to the store, decides and tells the others what comes next.
"""

from __future__ import annotations

import threading
import time

import structlog

from buffer import operations
from buffer.record.episode import Episode, PolicyVersion
from configs.hashes import settings_hash
from configs.logging import bind_version
from learner.algorithm.microbatch import Microbatch
from learner.checkpointing.checkpoint import LearnerState
from learner.checkpointing.rollback import roll_back
from learner.data.batch import BatchPlan, pack, plan_batch
from learner.data.claims import ClaimedBatch
from learner.data.evaluation import is_due
from learner.data.records import Records
from learner.reporting.metrics import StepTimes, Totals
from learner.reporting.summary import save_model, summarise
from learner.training.guards import Alert, Guard
from learner.training.step import TrainedBatch, train_batch
from learner.weights.background_publish import Handover

from .components import Parts
from .crowding import Crowding
from .rank_zero import Front

log = structlog.get_logger()

KEEPALIVE_S = 5.0  # other ranks hear from rank 0 this often while it waits for episodes
WAIT, STOP = b"", b"stop"


class Loop:
    """One life of the learner, from its opening to the end of the run or a request to stop."""

    def __init__(self, parts: Parts, stopping: threading.Event) -> None:
        self._parts = parts
        self._stopping = stopping
        self._run = parts.settings.run
        self._lineage = parts.opening.lineage
        self._lineages = parts.opening.lineages
        self._step = parts.opening.state.step
        self._checkpointed: int | None = self._step if parts.opening.checkpoint else None
        self._guard = Guard(parts.settings, parts.opening.state.guards)
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
        self._handover = Handover(parts.ranks.device)
        self._records = Records(
            parts.store, self._run, parts.settings.buffer, parts.settings.rewards
        )
        self._crowding = Crowding(parts.store, parts.settings.buffer)

    def run(self) -> bool:
        """Train until the run is done; False if asked to stop before.

        Raises:
            LostLineage: A newer learner owns the run.
            StoreError: The store refused, or was away for too long.
        """
        try:
            self._publish()
            self._handover.settle()
            if self._front is not None:
                self._front.start(self._step)
            while self._step < self._run.steps:
                if not self._train_next():
                    self._checkpoint()
                    return False
            return self._finish()
        finally:
            self._handover.close()
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
        held_s = self._handover.wait()
        ready = time.monotonic()
        parts.optimizer.rate_scale = self._guard.lr_scale
        trained = train_batch(
            parts.policy,
            parts.optimizer,
            plan.step,
            microbatches,
            settings=self._guard.algorithm,
            ranks=parts.ranks,
            reference=parts.reference,
            critic=parts.critic,
        )
        self._step = plan.step
        alerts = self._watch(trained)
        stepped = time.monotonic()
        self._hand_on()
        if batch is not None and self._front is not None:
            times = StepTimes(
                wait_s=round(claimed - began, 4),
                pack_s=round(packed - claimed, 4),
                weights_s=round(held_s, 4),
                train_s=round(stepped - ready, 4),
            )
            self._front.batch_log.record(batch, trained, times, alerts, claimed_at=claimed)
        # One that is due while steps are being skipped waits for the first good batch.
        if self._is_urgent() or (self._is_due() and not self._guard.is_shaken):
            self._checkpoint()
        if self._front is not None:
            self._front.after_step(self._step)
        return True

    def _watch(self, trained: TrainedBatch) -> list[Alert]:
        """Have the guards judge a batch, and go back to older weights if they say so."""
        alerts = self._guard.watch(trained)
        if self._guard.must_roll_back:
            parts = self._parts
            restored = roll_back(
                parts.checkpoints,
                parts.policy,
                parts.optimizer,
                ranks=parts.ranks,
                model_path=self._run.model_path,
                before=self._guard.state.restored_step,
                critic=parts.critic,
            )
            self._guard.rolled_back(restored)
        return alerts

    def _hand_on(self) -> None:
        """Say that the batch is trained, and publish what came of it."""
        if self._front is not None:
            self._front.ledger.step = self._step
            self._parts.store.run(operations.advance(self._lineage, self._step))
        # An evaluation waits for actors that have exactly these weights, or newer ones.
        every = self._parts.settings.learner.publish_every
        if self._step % every == 0 or is_due(self._run, self._step):
            self._publish()

    def _is_due(self) -> bool:
        """Whether a multiple of `checkpoint_every` has passed since the last checkpoint."""
        every = self._parts.settings.learner.checkpoint_every
        return self._step // every > (self._checkpointed or 0) // every

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
        version, parts = PolicyVersion(self._lineage, self._step), self._parts
        self._handover.begin(
            lambda free: parts.publisher.publish(parts.policy.causal_lm, version, free=free)
        )
        bind_version(f"{version.lineage}.{version.step}")

    def _checkpoint(self) -> None:
        """Checkpoint, then COMMIT; nothing if this step already is."""
        if self._checkpointed == self._step or not self._step:
            return
        self._handover.settle()
        began = time.monotonic()
        parts, front = self._parts, self._front
        recoveries = parts.store.recoveries
        self._guard.checkpoints()
        state = LearnerState(
            run=self._run.name,
            settings_hash=settings_hash(parts.settings.run),
            step=self._step,
            lineage=self._lineage,
            cursor=front.feeder.cursor if front is not None else 0,
            trained=front.trained_groups(self._step) if front is not None else (),
            totals=front.totals() if front is not None else Totals(),
            guards=self._guard.state,
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
        self._handover.settle()
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
        front.batch_log.end()
        evaluations = front.journal.lines("eval")
        front.journal.summarise(
            summarise(run, front.totals(), self._guard.state, stats, evaluations)
        )
        log.info("finished", steps=run.steps, cancelled_tasks=cancelled)
        return True
