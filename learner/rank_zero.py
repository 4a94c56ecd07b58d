"""What only rank 0 has: the store's side of a life of the learner, and the files that people read.

Owns claims, feeder, evaluations, journal and batch log, and looks after all of them while the loop
waits or trains.
"""

from __future__ import annotations

import threading
import time
from dataclasses import asdict

import structlog

from configs.settings import Settings
from learner.checkpointing.resume import StartState
from learner.data.claims import ClaimedBatch, Claims
from learner.data.curriculum import Feeder
from learner.data.evaluation import Evaluation, Evaluations, is_due
from learner.data.ledger import Ledger, as_ranges
from learner.data.retrying_store import RetryingStore
from learner.reporting.batch_log import BatchLog
from learner.reporting.journal import Journal
from learner.reporting.metrics import Totals

log = structlog.get_logger()


class RankZero:
    """What only rank 0 has: the store's side of a life, and the files that people read."""

    def __init__(
        self,
        settings: Settings,
        store: RetryingStore,
        start: StartState,
        *,
        ledger: Ledger,
        vocabulary: int,
    ) -> None:
        self._run = settings.run
        self.journal = Journal(settings.run.folder)
        self.journal.rewind(start.state.step)
        self.ledger = ledger
        self.claims = Claims(
            store,
            settings.run,
            buffer=settings.buffer,
            learner=settings.learner,
            algorithm=settings.algorithm,
            rewards=settings.rewards,
            replay=settings.replay,
            ledger=ledger,
            vocabulary=vocabulary,
        )
        self.batch_log = BatchLog(
            self.journal,
            self.claims.dropped,
            lineage=start.lineage,
            lineages=start.lineages,
            totals=start.state.totals,
        )
        self.feeder = Feeder(
            store,
            settings.run,
            settings.buffer,
            ledger=ledger,
            cursor=start.state.cursor,
        )
        self.evaluations = Evaluations(store, settings, ledger=ledger, report=self._report)

    def start(self, step: int) -> None:
        """Begin to feed, and evaluate where an earlier life has not."""
        self.feeder.start()
        self._evaluate(step)

    def wait(self, step: int, stopping: threading.Event, at_most_s: float) -> ClaimedBatch | None:
        """Wait a while for batch `step`, collecting evaluations meanwhile."""
        deadline = time.monotonic() + at_most_s

        def is_over() -> bool:
            self.feeder.check()
            self.evaluations.collect()
            return stopping.is_set() or time.monotonic() > deadline

        return self.claims.wait(step, until=is_over)

    def after_step(self, step: int) -> None:
        """Look after what runs beside training."""
        self.feeder.check()
        self._evaluate(step)
        self.evaluations.collect()

    def totals(self) -> Totals:
        """Count what the run has done so far."""
        self.batch_log.totals.dropped_tokens += self.claims.dropped.tokens
        self.claims.dropped.tokens = 0
        return self.batch_log.totals

    def trained_groups(self, step: int) -> tuple[tuple[int, int], ...]:
        """Write down the groups of all batches up to `step`, for the checkpoint."""
        return tuple(as_ranges(self.ledger.facts.groups_up_to(step)))

    def is_evaluated(self, step: int) -> bool:
        """Whether the result of the evaluation after `step` is written down, or none is due."""
        return not is_due(self._run, step) or any(
            line["step"] == step for line in self.journal.lines("eval")
        )

    def _evaluate(self, step: int) -> None:
        if not self.is_evaluated(step):
            self.evaluations.begin(step)

    def _report(self, evaluation: Evaluation) -> None:
        log.info("evaluated", step=evaluation.step, accuracy=round(evaluation.accuracy, 4))
        self.journal.append("eval", asdict(evaluation))
