"""Replay of kept batches on one rank: the learner's loop without a store, actors and publisher.

    read batch k from the run's folder -> plan -> train -> write its figures -> k + 1

The batches, the checkpoint before them and the settings are those of another run, whose folder is
only read. Each rank reads whole batches, and plans them as rank 0 of the run did: where nothing has
changed, every bit is the same (`docs/same-again.md`).
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import structlog
from torch import nn

from buffer.record.episode import Episode, PolicyVersion
from configs.errors import SettingsError
from configs.hashes import settings_hash
from configs.settings import Settings
from learner.checkpointing.checkpoint import Checkpoints
from learner.checkpointing.folders import FOLDER, read_lineages
from learner.checkpointing.learner_state import LearnerState
from learner.checkpointing.resume import StartState, fresh_state
from learner.data.batch import BatchPlan
from learner.data.claims import ClaimedBatch
from learner.data.kept_batches import read_kept
from learner.data.policy_lag import FreshTokens, mask_stale
from learner.data.records import shape_reward
from learner.model.ranks import Ranks
from learner.model.sequence_cost import SequenceCost
from learner.profiling import phase
from learner.reporting.batch_log import training_figures
from learner.reporting.journal import Journal
from learner.reporting.metrics import StepTimes, batch_figures
from learner.training.guards import Alert, Guard, GuardState
from learner.training.optimizer import Schedule, ScheduledOptimizer
from learner.training.step import TrainedBatch

from .assembly import join_ranks, load_critic, load_frozen, load_policy, load_user_losses
from .coordinator import STOP, YES, BatchPlanner, RankComponents, share_of
from .loop import MEMORY_FILE, Loop

log = structlog.get_logger()


def run_replay(settings: Settings, source: Path, last: int, stopping: threading.Event) -> bool:
    """Join the ranks, and replay as `replay_on` does; False if asked to stop before.

    Raises:
        SettingsError: A function of the loss cannot be loaded, or environments have teachers of
            their own.
        NyalaError: As `replay_on` raises it.
    """
    if isinstance(settings.algorithm.teacher, dict):
        raise SettingsError(
            "algorithm.teacher must be one teacher for a replay, got one for each environment: a "
            "kept batch does not name its environments; set one with --set algorithm.teacher=MODEL"
        )
    ranks = join_ranks(settings.learner, settings.parallel)
    try:
        load_user_losses(settings, ranks)
        return replay_on(ranks, settings, source, last, stopping)
    finally:
        ranks.destroy_process_group()


def replay_on(
    ranks: Ranks, settings: Settings, source: Path, last: int, stopping: threading.Event
) -> bool:
    """Train on the kept batches of a run up to `last`; False if asked to stop before. Collective.

    It begins at the checkpoint in the folder of `settings`, or at `run.model` if there is none.

    Args:
        ranks: All ranks.
        settings: Settings of the replay, which has a folder of its own.
        source: Folder of the run that kept the batches.
        last: The last batch.
        stopping: Set when the replay is asked to stop.

    Raises:
        SettingsError: A model or the critic cannot be loaded.
        CheckpointError: The checkpoint is damaged, or does not fit the settings.
        RecordError: A batch is not kept, or its file is damaged.
        NyalaError: Otherwise as `Loop.run` raises it.
    """
    policy = load_policy(settings, ranks, is_trained=True)
    reference, teachers = load_frozen(settings, ranks, policy)
    optimizer = ScheduledOptimizer(policy, Schedule.from_settings(settings), settings.learner)
    critic = load_critic(policy, settings, ranks)
    folder, keep = settings.run.folder, settings.learner.keep_checkpoints
    checkpoints = Checkpoints(folder / FOLDER, keep=keep, ranks=ranks, critic=critic)
    start = _start(settings, checkpoints, read_lineages(source))
    if start.checkpoint is not None:
        checkpoints.load(start.checkpoint, policy, optimizer)
    if ranks.is_first and (source / MEMORY_FILE).exists():  # which batches were cut smaller
        shutil.copyfile(source / MEMORY_FILE, folder / MEMORY_FILE)
    cost = SequenceCost.from_config(policy.causal_lm.config.to_dict())
    planner = BatchPlanner(settings, ranks, cost, lambda _: "")
    coordinator = ReplayRank(
        settings, source, last, ranks=ranks, start=start, planner=planner, stopping=stopping
    )
    components = RankComponents(
        run=settings.run,
        learner=settings.learner,
        algorithm=settings.algorithm,
        start=start,
        ranks=ranks,
        coordinator=coordinator,
        policy=policy,
        optimizer=optimizer,
        guard=Guard(settings.guards, settings.algorithm, start.state.guards),
        checkpoints=checkpoints,
        publisher=NoPublisher(),
        reference=reference,
        teachers=teachers,
        critic=critic,
        stopping=stopping,
        grace_s=settings.console.stop_timeout_s,
    )
    Loop(components).run()
    return coordinator.step == last


def _start(settings: Settings, checkpoints: Checkpoints, lineages: dict[int, int]) -> StartState:
    """Find the state at which the replay begins; collective."""
    newest = checkpoints.newest()
    path, state = (None, fresh_state(settings.run)) if newest is None else newest
    lineages = lineages or {1: 0}
    return StartState(
        lineage=max(lineages),
        lineages=lineages,
        owner="",
        state=replace(state, run=settings.run.name, settings_hash=settings_hash(settings.run)),
        checkpoint=path,
        reach=0,
        asked_again={},
    )


class NoPublisher:
    """A publisher without actors."""

    def publish(
        self,
        model: nn.Module,  # noqa: ARG002 - as every publisher
        version: PolicyVersion,  # noqa: ARG002
        *,
        free: Callable[[], None],
    ) -> None:
        """Let the model change again."""
        free()


class ReplayRank:
    """The `Coordinator` of every rank of a replay; that of rank 0 writes the figures."""

    def __init__(
        self,
        settings: Settings,
        source: Path,
        last: int,
        *,
        ranks: Ranks,
        start: StartState,
        planner: BatchPlanner,
        stopping: threading.Event,
    ) -> None:
        self._settings, self._source, self._last = settings, source, last
        self._ranks, self._start, self._planner = ranks, start, planner
        self._stopping = stopping
        self._journal = Journal(settings.run.folder)
        self._batch: ClaimedBatch | None = None
        """The batch that is trained."""
        self.step = start.state.step
        """The last trained batch."""

    def start(self, step: int) -> None:
        """Do nothing: no thread runs beside training."""

    def next_batch(
        self, step: int, microbatch_tokens: int
    ) -> tuple[BatchPlan, list[Episode]] | None:
        """Read and plan batch `step`; None after the last one, or when asked to stop.

        Raises:
            RecordError: It is not kept, or its file is damaged.
        """
        ends = step > self._last or self._stopping.is_set()
        order = (STOP if ends else YES) if self._ranks.is_first else None
        if self._ranks.broadcast(order) == STOP:
            return None
        with phase("fetch"):
            self._batch = batch = self._read(step)
        plan = self._planner.plan(batch, microbatch_tokens)
        return plan, share_of(plan, batch.episodes, self._ranks)

    def advance(self, step: int) -> None:
        """Note that batch `step` is trained."""
        self.step = step

    def record(self, trained: TrainedBatch, times: StepTimes, alerts: Sequence[Alert]) -> None:
        """Write the figures of the batch that do not depend on actors."""
        batch, self._batch = self._batch, None
        assert batch is not None, "a batch is trained after it was read"
        if not self._ranks.is_first:
            return
        figures = batch_figures(
            batch.episodes,
            step=batch.step,
            lineage=self._start.lineage,
            lineages=self._start.lineages,
            uses=batch.uses,
        )
        line = {
            "step": batch.step,
            "lineage": self._start.lineage,
            "time": time.time(),
            "is_replay": True,
            **asdict(figures),
            **training_figures(trained),
            "alerts": [alert.name for alert in alerts],
            **times.figures(trained_tokens=figures.trained_tokens),
        }
        self._journal.append("metrics", line)
        log.info("replayed", step=batch.step, loss=trained.loss)

    def must_checkpoint(
        self,
        step: int,  # noqa: ARG002 - as every coordinator
        *,
        has_skipped_step: bool,  # noqa: ARG002
    ) -> bool:
        """Return False: checkpoints are due by the number of batches alone."""
        return False

    def begin_checkpoint(self, step: int, guards: GuardState) -> LearnerState:
        """Return the state with its step."""
        return replace(self._start.state, step=step, guards=guards)

    def commit(self, step: int) -> None:
        """Do nothing: there is no store."""

    def after_step(self, step: int) -> None:
        """Do nothing: no thread runs beside training."""

    def finish(self, guards: GuardState) -> bool:  # noqa: ARG002 - as every coordinator
        """Return True: nothing is left to do."""
        return True

    def stopped(self) -> None:
        """Do nothing: there is no budget."""

    def close(self) -> None:
        """Do nothing: no thread runs beside training."""

    def _read(self, step: int) -> ClaimedBatch:
        """Read a batch with rewards shaped, and stale tokens masked as they were."""
        kept, run = read_kept(self._source, step), self._settings.run
        sampled = [
            shape_reward(
                episode,
                self._settings.rewards,
                max_completion_tokens=run.max_completion_tokens,
            )
            for episode in kept.episodes()
        ]
        episodes = mask_stale(
            sampled, kept.mask, step=step, lineages=self._start.lineages, reused=kept.uses
        )
        return ClaimedBatch(
            step,
            tuple(episodes),
            sampled=tuple(sampled),
            mask=kept.mask,
            tokens=FreshTokens(),
            is_replay=True,
            uses=kept.uses,
        )
