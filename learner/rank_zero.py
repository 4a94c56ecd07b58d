"""Rank 0: claims, task feeder, evaluations, commits and run files.

Waits for episodes, and at the very end for the last evaluation. While it waits, it broadcasts a
sign of life to the other ranks, and checks the feeder, whose tasks it waits for.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, replace

import structlog

from buffer import operations
from buffer.operations.values import Stats
from buffer.record.episode import Episode
from configs.settings import Settings
from learner.checkpointing.checkpoint import BackgroundSave
from learner.checkpointing.learner_state import LearnerState
from learner.checkpointing.resume import StartState
from learner.data.alarms import CommitPressure, SamplingAlarm
from learner.data.batch import BatchPlan
from learner.data.claims import ClaimedBatch, Claims
from learner.data.curriculum import Feeder, environment_by_group
from learner.data.evaluation import EvaluationResult, Evaluations, is_due, log_result
from learner.data.kept_batches import BatchKeeper
from learner.data.ledger import Ledger, as_ranges
from learner.data.records import Records
from learner.data.retrying_store import RetryingStore
from learner.data.sampler import Results, encode_curriculum, make_sampler, rewards_by_prompt
from learner.model.ranks import Ranks
from learner.model.sequence_cost import SequenceCost
from learner.reporting.advice.advisor_thread import AdvisorThread
from learner.reporting.batch_log import BatchLog
from learner.reporting.journal import Journal, summarise
from learner.reporting.metrics import StepTimes, Totals
from learner.reporting.metrics_page import LearnerPage
from learner.reporting.sample_writer import SampleWriter, run_vocabulary
from learner.reporting.trackers.tracking import Tracking
from learner.training.guards import Alert, GuardState
from learner.training.step import TrainedBatch

from .coordinator import NO, STOP, WAIT, YES, BatchPlanner, share_of

log = structlog.get_logger()

KEEPALIVE_S = 5.0  # other ranks receive a broadcast this often while rank 0 waits for episodes


class RankZero:
    """The `Coordinator` that talks to the store, decides for all ranks, and writes the run files.

    Args:
        settings: Settings of the run; its parts are made here.
        store: Store of the run.
        ranks: All ranks, to which plans and decisions are broadcast.
        start: State at which the run begins.
        under_way: The checkpoint that is being written, if one is.
        ledger: Facts that recovery asserts.
        vocabulary: Number of token ids of the policy; larger ids are refused.
        cost: Cost of an episode, by which ranks are balanced.
        page: Shows what is trained and evaluated.
        stopping: Set when the learner is asked to stop.
    """

    def __init__(
        self,
        settings: Settings,
        store: RetryingStore,
        ranks: Ranks,
        start: StartState,
        *,
        under_way: BackgroundSave,
        ledger: Ledger,
        vocabulary: int,
        cost: SequenceCost,
        page: LearnerPage,
        stopping: threading.Event,
    ) -> None:
        self._run = run = settings.run
        self._fleet = settings.fleet
        self._store, self._ranks, self._ledger = store, ranks, ledger
        self._environment_of = environment_by_group(run, ledger)
        self._planner = BatchPlanner(settings, ranks, cost, self._environment_of)
        self._stopping, self._page = stopping, page
        self._start, self._under_way = start, under_way
        self._journal = Journal(run.folder)
        self._journal.rewind(start.state.step)
        self._claims = Claims(
            store,
            run,
            buffer=settings.buffer,
            learner=settings.learner,
            algorithm=settings.algorithm,
            rewards=settings.rewards,
            replay=settings.replay,
            ledger=ledger,
            vocabulary=vocabulary,
        )
        self._alarm = SamplingAlarm(store, settings)
        self._records = Records(store, run, settings.buffer, settings.rewards)
        self._keeper = BatchKeeper(settings, self._records, step=start.state.step)
        self._samples = SampleWriter(
            run, step=start.state.step, lineage=start.lineage, environment_of=self._environment_of
        )
        self._batch_log = self._log(settings)
        self._sampler = make_sampler(run)
        self._feeder = self._feed(settings)
        self._evaluations = Evaluations(
            store,
            run,
            rewards=settings.rewards,
            ledger=ledger,
            timeout_s=settings.learner.eval_timeout_s,
            report=self._report,
            keep=self._samples.keep_answers,
        )
        self._pressure = CommitPressure(store, settings.buffer)
        self._batch: ClaimedBatch | None = None
        """The newest that was broadcast."""
        self._minutes = settings.learner.checkpoint_minutes or math.inf
        self._claimed_at = self._checkpoint_began = time.monotonic()
        self._recoveries = store.recoveries
        """Recoveries before the newest checkpoint began."""

    def start(self, step: int) -> None:
        """Start the threads beside training, and the evaluation after `step` if it has no result.

        An earlier learner may have ended before the result was there.
        """
        self._feeder.start()
        self._samples.start()
        self._batch_log.start()
        with self._store.may_be_gone():
            self._evaluate(step)

    def next_batch(
        self, step: int, microbatch_tokens: int
    ) -> tuple[BatchPlan, list[Episode]] | None:
        """Wait for batch `step`, plan it, and broadcast the plan; None when asked to stop.

        None also once the budget of the fleet is spent.
        """
        while (batch := self._wait(step)) is None:
            if self._must_stop():
                self._ranks.broadcast(STOP)
                return None
            self._alarm.check_progress((step, self._claims.num_ready))
            self._ranks.broadcast(WAIT)
        self._alarm.check_progress((step, None))
        plan = self._planner.plan(batch, microbatch_tokens)
        self._ranks.broadcast(plan.encode())
        self._batch, self._claimed_at = batch, time.monotonic()
        with self._store.may_be_gone():
            self._keeper.keep(batch)
        return plan, share_of(plan, batch.episodes, self._ranks)

    def advance(self, step: int) -> None:
        """Advance ledger and store: batch `step` is trained."""
        self._ledger.advance(step, self._measure(step))
        with self._store.may_be_gone():
            self._store.run(operations.advance(self._ledger.lineage, step))

    def record(self, trained: TrainedBatch, times: StepTimes, alerts: Sequence[Alert]) -> None:
        """Count the trained batch, and write its figures and samples into the run's files."""
        batch, self._batch = self._batch, None
        assert batch is not None, "a batch is trained after it was claimed"
        self._samples.keep_batch(batch.step, batch.sampled)
        line = self._batch_log.record(
            batch,
            trained,
            times,
            [*alerts, *self._samples.alerts()],
            claimed_at=self._claimed_at,
            beside=self._beside_training(),
        )
        self._page.trained(line)

    def stopped(self) -> None:
        """Raise the error of a spent budget, if that is why the ranks have stopped.

        Raises:
            BudgetSpent: The run's actors have cost what they may.
        """
        self._batch_log.check_budget()

    def must_checkpoint(self, step: int, *, has_skipped_step: bool) -> bool:
        """Decide for all ranks whether to checkpoint although none is due by the number of batches.

        `learner.checkpoint_minutes` have passed, which waits for a good batch where steps are being
        skipped. Or records of trained batches crowd Redis, even once the checkpoint under way is
        committed. Or Redis lost writes since the last one: it may lack records of batches that
        recovery declared trained, so that a later learner could not train them again.
        """
        is_crowded = False
        with self._store.may_be_gone():
            is_crowded = self._pressure.is_crowded(step)
            if is_crowded and self._under_way.is_under_way:
                self._ranks.broadcast(WAIT)
                self._under_way.wait()
                is_crowded = self._pressure.is_crowded(step)
        was_rewound = self._store.recoveries != self._recoveries
        minutes = (time.monotonic() - self._checkpoint_began) / 60
        is_late = minutes >= self._minutes and not has_skipped_step
        return self._ranks.broadcast(YES if is_crowded or was_rewound or is_late else NO) == YES

    def begin_checkpoint(self, step: int, guards: GuardState) -> LearnerState:
        """Return the state besides tensors for a checkpoint after batch `step`."""
        self._checkpoint_began = time.monotonic()
        self._recoveries = self._store.recoveries
        facts = self._ledger.facts
        return replace(
            self._start.state,
            step=step,
            lineage=self._ledger.lineage,
            cursor=self._feeder.cursor,
            trained=tuple(as_ranges(facts.groups_up_to(step))),
            curriculum=encode_curriculum(facts.untrained_choices, facts.results)
            if self._sampler
            else "",
            totals=self._totals(),
            guards=guards,
        )

    def commit(self, step: int) -> None:
        """COMMIT the batches up to `step`, and delete their records; in the checkpoint's thread."""
        self._ledger.checkpoint(step)
        committed = None
        with self._store.may_be_gone():
            committed = self._store.run(operations.commit(self._ledger.lineage, step))
            self._pressure.committed(step)
            self._records.sweep()
        took_s = round(time.monotonic() - self._checkpoint_began, 3)
        log.info("checkpoint", step=step, committed_tasks=committed, took_s=took_s)

    def after_step(self, step: int) -> None:
        """Check the feeder, evaluate the policy after `step` if it is due, and collect answers."""
        self._page.pulse.beat()
        with self._store.may_be_gone():
            self._feeder.check_feed_thread()
            self._evaluate(step)
            self._evaluations.note_sampling()
            self._evaluations.collect()
            self._show()

    def finish(self, guards: GuardState) -> bool:
        """Wait for the last evaluation, CANCEL what is left, and write the summary.

        False if asked to stop before: the store keeps what is left, and there is no summary.
        """
        run, lineage = self._run, self._ledger.lineage
        self._feeder.stop()
        stats: Stats | None = None
        cancelled = 0
        with self._store.may_be_gone():
            self._evaluations.finish(until=self._is_stopping)
            if self._stopping.is_set() and not self._is_evaluated(run.steps):
                return False
            self._show()
            cancelled = self._store.run(operations.cancel(lineage))
            self._store.run(operations.clear_replay(lineage))
            self._records.sweep(older_than_s=0.0)
            stats = self._store.run(operations.stats())
        if stats is None:
            return False
        self._samples.close()
        self._batch_log.finish_totals()
        evaluations = self._journal.lines("eval")
        figures = summarise(run, self._totals(), guards, stats, evaluations)
        self._journal.summarise(figures | self._batch_log.summary(evaluations))
        self._batch_log.deliver(until=self._is_stopping)
        log.info("finished", steps=run.steps, cancelled_tasks=cancelled)
        return True

    def close(self) -> None:
        """Stop the threads that run beside training."""
        self._feeder.stop()
        self._samples.close()
        self._keeper.close()
        self._batch_log.close()

    def _show(self) -> None:
        """Show observers how the run goes; a snapshot that is too large is left out."""
        run_snapshot = self._journal.run_snapshot.encode()
        if run_snapshot is not None:
            self._store.run(operations.write_run_snapshot(self._ledger.lineage, run_snapshot))

    def _beside_training(self) -> dict[str, float]:
        """Return the figures of what goes on beside training."""
        sampler, results = self._sampler, self._ledger.facts.results
        return {
            "sampling_alarms": self._alarm.alarms,
            "dropped_samples": self._samples.dropped,
            **(sampler.success_shares(results) if sampler else {}),
        }

    def _measure(self, step: int) -> dict[int, Results] | None:
        """Return the results of prompts with those of batch `step`; None without a sampler."""
        batch = self._batch
        if self._sampler is None or batch is None:
            return None
        new = (episode for episode in batch.episodes if episode.group_id not in batch.uses)
        rewards = {**rewards_by_prompt(new), **batch.filtered}
        return self._sampler.measure(self._ledger.facts.results, step, rewards)

    def _feed(self, settings: Settings) -> Feeder:
        return Feeder(
            self._store,
            self._run,
            settings.buffer,
            ledger=self._ledger,
            cursor=self._start.state.cursor,
            sampler=self._sampler,
        )

    def _log(self, settings: Settings) -> BatchLog:
        return BatchLog(
            self._journal,
            self._claims.dropped,
            lineage=self._start.lineage,
            lineages=self._start.lineages,
            totals=self._start.state.totals,
            environment_of=self._environment_of,
            advisor=AdvisorThread(settings, self._store, run_vocabulary(self._run)),
            tracking=Tracking(settings),
            fleet=self._fleet,
        )

    def _wait(self, step: int) -> ClaimedBatch | None:
        """Wait for batch `step`, `KEEPALIVE_S` at most, collecting evaluations meanwhile."""
        deadline = time.monotonic() + KEEPALIVE_S

        def is_over() -> bool:
            self._page.pulse.beat()
            self._feeder.check_feed_thread()
            self._under_way.check_last_save()
            self._evaluations.collect()
            return self._must_stop() or time.monotonic() > deadline

        with self._store.may_be_gone():
            return self._claims.wait(step, until=is_over)
        return None

    def _must_stop(self) -> bool:
        return self._stopping.is_set() or self._batch_log.is_budget_spent

    def _is_stopping(self) -> bool:
        self._page.pulse.beat()
        return self._stopping.is_set()

    def _totals(self) -> Totals:
        """Totals of the run up to now."""
        self._batch_log.totals.dropped_tokens += self._claims.dropped.tokens
        self._claims.dropped.tokens = 0
        return self._batch_log.totals

    def _evaluate(self, step: int) -> None:
        if not self._is_evaluated(step):
            self._evaluations.begin_round(step)

    def _is_evaluated(self, step: int) -> bool:
        """Whether the result of the evaluation after `step` is in the journal, or none is due."""
        return not is_due(self._run, step) or any(
            line["step"] == step for line in self._journal.lines("eval")
        )

    def _report(self, evaluation: EvaluationResult) -> None:
        log_result(evaluation)
        self._journal.append("eval", asdict(evaluation))
        self._page.evaluated(evaluation)
        self._batch_log.evaluated(evaluation.reward)
