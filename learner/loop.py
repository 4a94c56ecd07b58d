"""The learner's loop: claim -> train -> guard -> advance -> publish -> write down -> checkpoint.

Publishing runs beside what follows it until the model is needed again (`background_publish.py`).

Consumes sealed claims. Waits for episodes, and at the very end for the last evaluation; never for
an actor, a transfer of weights or an evaluation in between. All ranks run the same loop: rank 0
talks to the store, decides and tells the others what comes next.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

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
from learner.weights.background_publish import BackgroundPublisher

from .components import Components
from .crowding import Crowding
from .rank_zero import RankZero

log = structlog.get_logger()

KEEPALIVE_S = 5.0  # other ranks hear from rank 0 this often while it waits for episodes
WAIT, STOP = b"", b"stop"
SWITCH_S = 5e-5
"""How soon the interpreter passes from claiming and packing to publishing, which needs it again
after each of some hundred short operations. Measured: the gather of 300 small tensors beside a
thread that decodes JSON takes 66 ms at Python's 5 ms, 39 ms at this, and 5 ms alone (medians of 9,
two busy cores)."""


class Loop:
    """One life of the learner, from its start to the end of the run or a request to stop."""

    def __init__(self, components: Components, stopping: threading.Event) -> None:
        self._components = components
        self._stopping = stopping
        self._run = components.settings.run
        self._lineage = components.start.lineage
        self._lineages = components.start.lineages
        self._step = components.start.state.step
        self._checkpointed: int | None = self._step if components.start.checkpoint else None
        self._guard = Guard(
            components.settings.guards, components.settings.algorithm, components.start.state.guards
        )
        self._coordinator: RankZero | None = None
        self._recoveries = components.store.recoveries
        if components.ledger is not None:
            self._coordinator = RankZero(
                components.settings,
                components.store,
                components.start,
                ledger=components.ledger,
                vocabulary=components.policy.vocabulary,
            )
        self._background = BackgroundPublisher(components.ranks.device)
        self._records = Records(
            components.store, self._run, components.settings.buffer, components.settings.rewards
        )
        self._crowding = Crowding(components.store, components.settings.buffer)

    def run(self) -> bool:
        """Train until the run is done; False if asked to stop before.

        Raises:
            LostLineage: A newer learner owns the run.
            StoreError: The store refused, or was away for too long.
        """
        try:
            self._publish()
            self._background.join()
            if self._coordinator is not None:
                self._coordinator.start(self._step)
            while self._step < self._run.steps:
                if not self._train_next():
                    self._checkpoint()
                    return False
            return self._finish()
        finally:
            self._background.close()
            if self._coordinator is not None:
                self._coordinator.feeder.stop()

    def _train_next(self) -> bool:
        """Train one batch; False if asked to stop while waiting for it."""
        components, began = self._components, time.monotonic()
        with _switch_interval(SWITCH_S):
            batch, plan = self._next_batch(self._step + 1)
            if plan is None:
                return False
            claimed = time.monotonic()
            microbatches = self._pack(plan, batch)
            packed = time.monotonic()
            held_s = self._background.wait()
        ready = time.monotonic()
        components.optimizer.rate_scale = self._guard.lr_scale
        trained = train_batch(
            components.policy,
            components.optimizer,
            plan.step,
            microbatches,
            settings=self._guard.algorithm,
            ranks=components.ranks,
            reference=components.reference,
            critic=components.critic,
        )
        self._step = plan.step
        alerts = self._watch(trained)
        stepped = time.monotonic()
        self._hand_on()
        if batch is not None and self._coordinator is not None:
            times = StepTimes(
                wait_s=round(claimed - began, 4),
                pack_s=round(packed - claimed, 4),
                weights_s=round(held_s, 4),
                train_s=round(stepped - ready, 4),
            )
            self._coordinator.batch_log.record(batch, trained, times, alerts, claimed_at=claimed)
        # One that is due while steps are being skipped waits for the first good batch.
        if self._is_urgent() or (self._is_due() and not self._guard.is_shaken):
            self._checkpoint()
        if self._coordinator is not None:
            self._coordinator.after_step(self._step)
        return True

    def _watch(self, trained: TrainedBatch) -> list[Alert]:
        """Have the guards judge a batch, and go back to older weights if they say so."""
        alerts = self._guard.watch(trained)
        if self._guard.must_roll_back:
            components = self._components
            restored = roll_back(
                components.checkpoints,
                components.policy,
                components.optimizer,
                ranks=components.ranks,
                model_path=self._run.model_path,
                before=self._guard.state.restored_step,
                critic=components.critic,
            )
            self._guard.rolled_back(restored)
        return alerts

    def _hand_on(self) -> None:
        """Say that the batch is trained, and publish what came of it."""
        if self._coordinator is not None:
            self._coordinator.ledger.advance(self._step)
            self._components.store.run(operations.advance(self._lineage, self._step))
        # An evaluation waits for actors that have exactly these weights, or newer ones.
        every = self._components.settings.learner.publish_every
        if self._step % every == 0 or is_due(self._run, self._step):
            self._publish()

    def _is_due(self) -> bool:
        """Whether a multiple of `checkpoint_every` has passed since the last checkpoint."""
        every = self._components.settings.learner.checkpoint_every
        return self._step // every > (self._checkpointed or 0) // every

    def _is_urgent(self) -> bool:
        """Whether to checkpoint before it is due; every rank calls it.

        Either Redis is crowded with records of trained batches, or it lost writes since the last
        checkpoint: it was told of batches whose records it may not have, so a new life could not
        train them again.
        """
        answer = None
        if self._coordinator is not None:
            is_crowded = self._crowding.is_crowded(self._step)
            was_rewound = self._components.store.recoveries != self._recoveries
            answer = b"yes" if is_crowded or was_rewound else b"no"
        return self._components.ranks.broadcast(answer) == b"yes"

    def _next_batch(self, step: int) -> tuple[ClaimedBatch | None, BatchPlan | None]:
        """Wait for batch `step`; no plan means stop. Only rank 0 gets the episodes."""
        ranks = self._components.ranks
        batch = None
        while True:
            directive = None
            if self._coordinator is not None:
                batch = self._coordinator.wait(step, self._stopping, KEEPALIVE_S)
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
            ranks=self._components.ranks.size,
            settings=self._components.settings.algorithm,
            max_completion_tokens=self._run.max_completion_tokens,
            num_minibatches=self._components.settings.algorithm.num_minibatches,
        )

    def _pack(self, plan: BatchPlan, batch: ClaimedBatch | None) -> list[Microbatch]:
        return pack(
            plan,
            self._own_episodes(plan, batch),
            settings=self._components.settings.algorithm,
            microbatch_tokens=self._components.settings.learner.microbatch_tokens,
            lineages=self._lineages,
            lineage=self._lineage,
        )

    def _own_episodes(self, plan: BatchPlan, batch: ClaimedBatch | None) -> list[Episode]:
        """This rank's share: rank 0 has already read all, the others fetch theirs."""
        own = [row.task_id for row in plan.rows if row.rank == self._components.ranks.rank]
        if batch is not None:
            by_id = {episode.task_id: episode for episode in batch.episodes}
            return [by_id[task_id] for task_id in own]
        return self._records.episodes(own)

    def _publish(self) -> None:
        version, components = PolicyVersion(self._lineage, self._step), self._components
        self._background.start(
            lambda free: components.publisher.publish(
                components.policy.causal_lm, version, free=free
            )
        )
        bind_version(f"{version.lineage}.{version.step}")

    def _checkpoint(self) -> None:
        """Checkpoint, then COMMIT; nothing if this step already is."""
        if self._checkpointed == self._step or not self._step:
            return
        self._background.join()
        began = time.monotonic()
        components, coordinator = self._components, self._coordinator
        recoveries = components.store.recoveries
        self._guard.checkpoints()
        state = LearnerState(
            run=self._run.name,
            settings_hash=settings_hash(components.settings.run),
            step=self._step,
            lineage=self._lineage,
            cursor=coordinator.feeder.cursor if coordinator is not None else 0,
            trained=coordinator.trained_groups(self._step) if coordinator is not None else (),
            totals=coordinator.totals() if coordinator is not None else Totals(),
            guards=self._guard.state,
        )
        components.checkpoints.save(state, components.policy, components.optimizer)
        self._checkpointed = self._step
        self._recoveries = recoveries
        if coordinator is not None:
            coordinator.ledger.checkpoint(self._step)
            committed = components.store.run(operations.commit(self._lineage, self._step))
            self._crowding.committed(self._step)
            self._records.sweep()
            took_s = round(time.monotonic() - began, 3)
            log.info("checkpoint", step=self._step, committed_tasks=committed, took_s=took_s)

    def _finish(self) -> bool:
        """End the run: model, last evaluation, CANCEL, summary; False if asked to stop before."""
        self._checkpoint()
        self._background.join()
        run, coordinator = self._run, self._coordinator
        save_model(self._components.policy, run, run.folder / "model", self._components.ranks)
        if coordinator is None:
            return True
        coordinator.feeder.stop()
        coordinator.evaluations.finish(until=self._stopping.is_set)
        if self._stopping.is_set() and not coordinator.is_evaluated(run.steps):
            return False
        cancelled = self._components.store.run(operations.cancel(self._lineage))
        self._components.store.run(operations.clear_replay(self._lineage))
        self._records.sweep(older_than_s=0.0)
        stats = self._components.store.run(operations.stats())
        coordinator.batch_log.end()
        evaluations = coordinator.journal.lines("eval")
        coordinator.journal.summarise(
            summarise(run, coordinator.totals(), self._guard.state, stats, evaluations)
        )
        log.info("finished", steps=run.steps, cancelled_tasks=cancelled)
        return True


@contextlib.contextmanager
def _switch_interval(seconds: float) -> Iterator[None]:
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(usual_s)
