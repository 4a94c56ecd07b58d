"""Supervised training of a run's model: `python -m learner sft`, which `nyala sft` starts.

    load -> newest checkpoint -> step, figures, held-out loss, checkpoint -> ... -> model

Consumes demonstrations in tokens, which an export of the actors wrote. There is no store: rank 0
tells the others before each step whether to go on, to save or to stop. A step is a function of its
number, so a run that was killed goes on from its newest checkpoint as if nothing had happened.
"""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import structlog

from buffer.record.demonstrations import Demonstrations
from configs import durable
from configs.errors import CheckpointError, DivergedError
from configs.hashes import settings_hash
from configs.settings import Settings
from learner.checkpointing.bucket_copies import BucketCopies
from learner.checkpointing.checkpoint import Checkpoints
from learner.checkpointing.export import export_adapter, export_model
from learner.checkpointing.folders import FOLDER, read_lineages, write_lineages
from learner.checkpointing.learner_state import LearnerState
from learner.data.grades import LOG_LIKELIHOOD
from learner.model.ranks import Ranks, join
from learner.reporting.figures import SUPERVISED_FILE
from learner.reporting.journal import Journal
from learner.reporting.metrics import StepTimes, Totals
from learner.reporting.trackers.tracking import Tracking
from learner.training.optimizer import Schedule, ScheduledOptimizer

from .assembly import load_policy
from .loop import MemoryBudget, is_out_of_memory
from .profiling import RECORDER, phase, take
from .supervised import RowOrder, SupervisedStep, SupervisedTraining

log = structlog.get_logger()

GO_ON, SAVE, STOP = b"go on", b"save", b"stop"
"""What rank 0 tells the others after a step."""


def train_supervised(settings: Settings, demonstrations: Path, stopping: threading.Event) -> bool:
    """Train the run's model on demonstrations; False if asked to stop before the last step.

    At the end rank 0 writes the model, and its adapters, into the run's folder.

    Raises:
        SettingsError: A person has to change something first.
        RecordError: There are no demonstrations.
        CheckpointError: The checkpoints cannot be trusted, or are of other demonstrations.
        DivergedError: Several steps in a row had no finite loss or gradient.
        OutOfMemory: A step did not fit into memory; the next life has a smaller budget.
    """
    log.info("starting", stage="joining the process group")
    learner = settings.learner
    ranks = join(
        learner.device,
        threads=learner.threads,
        parallel=settings.parallel,
        timeout_s=learner.collective_timeout_s,
    )
    try:
        return SupervisedRun(settings, Demonstrations.read(demonstrations), ranks, stopping).run()
    finally:
        ranks.destroy_process_group()


class SupervisedRun:
    """One life of the learner, from the newest checkpoint to the last step or a request to stop."""

    def __init__(
        self,
        settings: Settings,
        rows: Demonstrations,
        ranks: Ranks,
        stopping: threading.Event,
    ) -> None:
        """Load the model, and the newest checkpoint if there is one. Collective.

        Raises:
            SettingsError: The model cannot be loaded, or does not fit the settings.
            CheckpointError: The checkpoints cannot be trusted, or are of other demonstrations.
        """
        self._settings, self._run, self._learner = settings, settings.run, settings.learner
        self._ranks, self._stopping = ranks, stopping
        sft = settings.sft
        self._order = RowOrder(
            num_rows=rows.num_trained,
            batch=sft.batch,
            total=sft.total(rows.num_trained),
            seed=self._run.seed,
        )
        log.info("starting", stage="loading the model")
        self._policy = load_policy(settings, ranks, is_trained=True)
        schedule = replace(Schedule.from_settings(settings), steps=self._order.steps)
        self._optimizer = ScheduledOptimizer(self._policy, schedule, self._learner)
        self._checkpoints = Checkpoints(
            self._run.folder / FOLDER,
            keep=self._learner.keep_checkpoints,
            ranks=ranks,
            is_evaluated=lambda step: self._learner.keep_best and self._is_evaluated(step),
            copies=BucketCopies.from_settings(settings),
        )
        self._memory = MemoryBudget(self._run.folder, self._learner.microbatch_tokens, ranks)
        self._training = SupervisedTraining(
            self._policy,
            self._optimizer,
            rows,
            self._order,
            self._memory.tokens,
            ranks,
        )
        self._num_held_out = rows.num_held_out
        self._skipped_in_a_row = 0
        self._began = self._saved_at = time.monotonic()
        self._state = self._resume(_identity(settings, rows))
        self._saved = self._state.step
        self._journal = Journal(self._run.folder) if ranks.is_first else None
        self._tracking = Tracking(settings)

    def _resume(self, identity: str) -> LearnerState:
        """Load the newest checkpoint, and begin a lineage; return the state to go on from."""
        newest = self._checkpoints.newest()
        state = LearnerState(
            run=self._run.name,
            settings_hash=identity,
            step=0,
            lineage=0,
            cursor=0,
            trained=(),
            totals=Totals(),
        )
        if newest is not None:
            path, state = newest
            if state.settings_hash != identity:
                raise CheckpointError(
                    f"{path} must be of these demonstrations and settings of `sft` and `run`, got "
                    "one of others; restore them, or begin again with --fresh"
                )
            log.info("starting", stage="loading the checkpoint", path=str(path))
            self._checkpoints.load(path, self._policy, self._optimizer)
        lineages = read_lineages(self._run.folder)
        lineage = max([state.lineage, *lineages]) + 1
        self._ranks.barrier()  # all have read the file
        if self._ranks.is_first:
            write_lineages(self._run.folder, lineages | {lineage: state.step})
        return replace(state, lineage=lineage)

    def run(self) -> bool:
        """Train until the last step is done; False if asked to stop before.

        Raises:
            DivergedError: Several steps in a row had no finite loss or gradient.
            OutOfMemory: A step did not fit into memory; the next life has a smaller budget.
            SettingsError: It did not fit after all halvings of the budget either.
            LostLineage: A later learner has begun.
        """
        done = self._state.step
        if self._journal is not None:
            self._journal.rewind(done)
            self._tracking.start()
        log.info("starting", stage="training the first batch")
        RECORDER.begin_recording(self._ranks.device)
        self._began = self._saved_at = time.monotonic()
        try:
            if not done:
                self._evaluate(0)
            for trained in self._steps(done):
                is_over = trained.step == self._order.steps
                self._finish_step(trained)
                told = SAVE if is_over else self._tell(trained.step)
                if told != GO_ON:
                    self._save(is_last=is_over or told == STOP)
                if told == STOP:
                    return False
            self._finish()
        finally:
            self._checkpoints.under_way.close()
            self._tracking.close()
        return True

    def _steps(self, done: int) -> Iterator[SupervisedStep]:
        """Take the optimizer steps behind the first `done`; halve the budget out of memory."""
        steps = self._training.train(done=done)
        for step in range(done + 1, self._order.steps + 1):
            try:
                yield next(steps)
            except RuntimeError as error:
                if is_out_of_memory(error):
                    self._memory.halve(step, error)
                raise

    def _finish_step(self, trained: SupervisedStep) -> None:
        """Check and write down the figures of a step, with the held-out loss if it is due."""
        skipped = trained.outcome.skipped
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        if self._skipped_in_a_row >= self._settings.guards.max_skipped_in_a_row:
            raise DivergedError(
                f"the loss and gradient of supervised training must be finite, got "
                f"{self._skipped_in_a_row} steps in a row that are not, up to step {trained.step}; "
                f"lower learner.lr, which is {self._learner.lr:g}, and begin again with --fresh"
            )
        totals = self._state.totals
        now = time.monotonic()
        totals.wall_s += now - self._began
        self._began = now
        totals.trained_tokens += trained.trained_tokens
        totals.skipped_steps += int(skipped)
        self._state = replace(self._state, step=trained.step)
        held_out = self._evaluate(trained.step) if self._is_evaluated(trained.step) else {}
        times = StepTimes(take(), None, None).figures(trained_tokens=trained.trained_tokens)
        if self._journal is not None:
            line = {
                **trained.as_line(),
                **held_out,
                "optimizer_steps": 1,
                "lineage": self._state.lineage,
                "time": time.time(),
                "wall_s": round(totals.wall_s, 3),
                **times,
            }
            self._journal.append("metrics", line)
            self._tracking.wake()

    def _is_evaluated(self, step: int) -> bool:
        every = self._run.eval_every
        is_due = step in {0, self._order.steps} or bool(every and step % every == 0)
        return bool(self._num_held_out) and is_due

    def _evaluate(self, step: int) -> Mapping[str, float]:
        """Measure the loss of the rows that are set aside; nothing where there are none."""
        with phase("prepare"):
            loss = self._training.held_out_loss(step)
        if loss is None:
            return {}
        if self._journal is not None and step not in self._journal.scores():
            log.info("evaluated", step=step, loss=round(loss, 4))
            line = {"step": step, "metric": LOG_LIKELIHOOD, "score": -loss, "n": self._num_held_out}
            self._journal.append("eval", line)
        return {"sft_held_out_loss": loss}

    def _tell(self, step: int) -> bytes:
        """Decide on rank 0 whether to go on, save or stop, and tell all ranks."""
        if not self._ranks.is_first:
            return self._ranks.broadcast(None)
        if self._stopping.is_set():
            return self._ranks.broadcast(STOP)
        every, minutes = self._learner.checkpoint_every, self._learner.checkpoint_minutes
        is_late = time.monotonic() - self._saved_at >= 60 * (minutes or math.inf)
        is_due = step // every > self._saved // every or is_late
        return self._ranks.broadcast(SAVE if is_due and not self._skipped_in_a_row else GO_ON)

    def _save(self, *, is_last: bool) -> None:
        """Write a checkpoint: in the background, or the last one before this returns."""
        step = self._state.step
        self._saved, self._saved_at = step, time.monotonic()
        self._checkpoints.under_way.wait()
        with phase("checkpoint"):
            state = replace(self._state, totals=replace(self._state.totals))
            self._checkpoints.begin_save(
                state,
                self._policy,
                self._optimizer,
                then=lambda: log.info("checkpoint", step=step),
            )
        if is_last:
            self._checkpoints.under_way.wait()

    def _finish(self) -> None:
        """Write model and summary."""
        if self._journal is None:
            return
        run, totals = self._run, self._state.totals
        saved = self._checkpoints.path_of(self._order.steps)
        export_model(saved, run, run.folder / "model")
        lines = (run.folder / "metrics.jsonl").read_bytes()
        durable.replace_file(run.folder / "model" / SUPERVISED_FILE, lines)
        if self._policy.adapter is not None:
            export_adapter(saved, run, run.folder / "adapter")
        losses = [line["sft_loss"] for line in self._journal.lines("metrics")]
        scores = self._journal.scores()
        ends = {"before": scores.get(0), "after": scores.get(self._order.steps)}
        held_out = {f"held_out_{LOG_LIKELIHOOD}_{when}": score for when, score in ends.items()}
        self._journal.summarise(
            {
                **(held_out if scores else {}),
                "sft_loss_first": losses[0],
                "sft_loss_last": losses[-1],
                "steps": self._order.steps,
                "sft_rows": self._order.total,
                "trained_tokens": totals.trained_tokens,
                "wall_s": round(totals.wall_s, 2),
                "skipped_steps": totals.skipped_steps,
                "learner_lives": self._state.lineage,
            }
        )
        self._tracking.finish(until=self._stopping.is_set)
        log.info("finished", steps=self._order.steps)


def _identity(settings: Settings, rows: Demonstrations) -> str:
    """Hash what decides the rows of each step: a checkpoint of others is refused."""
    sft = settings.sft.model_dump_json(include={"epochs", "batch"})
    text = f"{settings_hash(settings.run)} {sft} {rows.digest}"
    return hashlib.sha256(text.encode()).hexdigest()
