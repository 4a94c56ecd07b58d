"""Coordination of ranks: what the loop asks of rank 0 and of followers; the components of a rank.

Rank 0 (`rank_zero.py`) talks to the store, decides which batch comes next and when to checkpoint,
and broadcasts; every other rank is a `FollowerRank`. The loop is the same on all ranks: it calls
these methods in the same order everywhere.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import nn

from buffer.record.episode import Episode, PolicyVersion
from configs.settings import AlgorithmSettings, LearnerSettings, RunSettings, Settings
from learner.checkpointing.checkpoint import BackgroundSave, Checkpoints
from learner.checkpointing.learner_state import LearnerState
from learner.checkpointing.resume import StartState
from learner.data.batch import BatchPlan, TeacherPrompt, plan_batch, prompt_of_episode
from learner.data.claims import ClaimedBatch
from learner.data.policy_lag import mask_stale
from learner.data.records import Records
from learner.model.policy import Policy
from learner.model.ranks import Ranks
from learner.model.sequence_cost import SequenceCost
from learner.reporting.metrics import StepTimes
from learner.training.critic import Critic
from learner.training.guards import Alert, Guard, GuardState
from learner.training.optimizer import ScheduledOptimizer
from learner.training.step import TrainedBatch

from .profiling import phase
from .stopping import Leave

WAIT, STOP = b"", b"stop"
"""Broadcast in place of a plan: `WAIT` = no batch yet, `STOP` = no further batch. In place of the
decision to checkpoint: `WAIT` = every rank first waits for the checkpoint under way."""
YES, NO = b"yes", b"no"


class Coordinator(Protocol):
    """The work of a rank around the training of batches."""

    def start(self, step: int) -> None:
        """Start the threads that run beside training; `step` batches are trained."""
        ...

    def next_batch(
        self, step: int, microbatch_tokens: int
    ) -> tuple[BatchPlan, list[Episode]] | None:
        """Wait for batch `step`: its plan and this rank's episodes; None to stop. Collective.

        Raises:
            LostLineage: A newer learner owns the run.
            StoreError: The store refused, or was away for too long.
            DeadlineError: The batch did not fill in time.
            RecordError: A batch that an earlier life sealed has a missing or malformed record.
            DeterminismError: A deterministic run has lost a task.
            Exception: The error that ended a thread beside training, or the last checkpoint.
        """
        ...

    def advance(self, step: int) -> None:
        """Declare batch `step` trained."""
        ...

    def record(self, trained: TrainedBatch, times: StepTimes, alerts: Sequence[Alert]) -> None:
        """Count the trained batch, and write its figures into the run's files."""
        ...

    def must_checkpoint(self, step: int, *, has_skipped_step: bool) -> bool:
        """Whether to checkpoint after batch `step` although no checkpoint is due. Collective.

        The answer is the same on all ranks. May wait for a checkpoint under way.

        Args:
            step: Batches that have been trained.
            has_skipped_step: Whether an optimizer step of the last batch was skipped; a checkpoint
                that is due by time then waits for a batch without one.
        """
        ...

    def begin_checkpoint(self, step: int, guards: GuardState) -> LearnerState:
        """Return the state besides tensors for a checkpoint after batch `step`."""
        ...

    def commit(self, step: int) -> None:
        """Commit the batches up to `step`, which are inside a durable checkpoint.

        Their records are deleted from the store. Called in the thread that wrote the checkpoint.
        """
        ...

    def after_step(self, step: int) -> None:
        """Check the threads beside training, and begin an evaluation of the policy if one is due.

        Raises:
            Exception: The error that ended a thread beside training.
        """
        ...

    def finish(self, guards: GuardState) -> bool:
        """End the run after its last batch; False if asked to stop before.

        Rank 0 waits for the last evaluation first, and then cancels what is left in the store.
        """
        ...

    def stopped(self) -> None:
        """Take note that all ranks have stopped before the end, with a durable checkpoint.

        Raises:
            BudgetSpent: The run's actors have cost what they may.
        """
        ...

    def close(self) -> None:
        """End the threads that run beside training."""
        ...


class BatchPlanner:
    """Plans claimed batches by the settings; the same plan wherever it is made."""

    def __init__(
        self,
        settings: Settings,
        ranks: Ranks,
        cost: SequenceCost,
        environment_of: Callable[[int], str],
    ) -> None:
        """Make a planner.

        Args:
            settings: Settings of the run.
            ranks: Ranks that share each batch.
            cost: Cost of a sequence.
            environment_of: Names the environment of a group, which may decide on its teacher.
        """
        self._settings, self._ranks, self._cost = settings, ranks, cost
        self._environment_of = environment_of

    def plan(self, batch: ClaimedBatch, microbatch_tokens: int) -> BatchPlan:
        """Plan a batch; a critic's own token budget is halved as often as the policy's is."""
        algorithm, critic_tokens = self._settings.algorithm, self._settings.critic.microbatch_tokens
        if critic_tokens is not None:
            whole = self._settings.learner.microbatch_tokens
            critic_tokens = max(1, critic_tokens * microbatch_tokens // whole)
        plan = plan_batch(
            batch.step,
            batch.episodes,
            ranks=self._ranks.data_size,
            settings=algorithm,
            max_completion_tokens=self._settings.run.max_completion_tokens,
            microbatch_tokens=microbatch_tokens,
            critic_tokens=critic_tokens,
            num_minibatches=algorithm.num_minibatches,
            cost=self._cost,
            environment_of=self._environment_of,
        )
        return replace(plan, mask=batch.mask, reused=tuple(batch.uses))


def share_of(plan: BatchPlan, episodes: Iterable[Episode], ranks: Ranks) -> list[Episode]:
    """Choose the episodes of this rank from all of a planned batch."""
    by_id = {episode.task_id: episode for episode in episodes}
    return [by_id[task_id] for task_id in plan.task_ids_of(ranks.data_rank)]


class FollowerRank:
    """The `Coordinator` of any rank but rank 0: receives plans, and reads this rank's episodes."""

    def __init__(
        self, ranks: Ranks, records: Records, start: StartState, under_way: BackgroundSave
    ) -> None:
        self._ranks = ranks
        self._under_way = under_way
        self._records = records
        self._start = start

    def start(self, step: int) -> None:
        """Do nothing: no thread runs beside training."""

    def next_batch(
        self,
        step: int,
        microbatch_tokens: int,  # noqa: ARG002 - as every coordinator
    ) -> tuple[BatchPlan, list[Episode]] | None:
        """Receive the plan of batch `step`, and read this rank's episodes; None to stop.

        Raises:
            RecordError: A record is missing or malformed.
            StoreError: The store refused, or was away for too long.
        """
        while (message := self._ranks.broadcast(None)) == WAIT:
            pass
        if message == STOP:
            return None
        plan = BatchPlan.decode(message)
        with phase("fetch"):
            episodes = self._records.episodes(plan.task_ids_of(self._ranks.data_rank))
        lineages = self._start.lineages
        return plan, mask_stale(
            episodes, plan.mask, step=step, lineages=lineages, reused=plan.reused
        )

    def advance(self, step: int) -> None:
        """Do nothing: rank 0 does it."""

    def record(self, trained: TrainedBatch, times: StepTimes, alerts: Sequence[Alert]) -> None:
        """Do nothing: rank 0 records figures, which are sums over all ranks."""

    def must_checkpoint(
        self,
        step: int,  # noqa: ARG002 - as every coordinator
        *,
        has_skipped_step: bool,  # noqa: ARG002
    ) -> bool:
        """Receive the decision, which may have to wait for a checkpoint under way."""
        while (decision := self._ranks.broadcast(None)) == WAIT:
            self._under_way.wait()
        return decision == YES

    def begin_checkpoint(self, step: int, guards: GuardState) -> LearnerState:
        """Return the state with its step; rank 0 has the rest, and writes it."""
        return replace(self._start.state, step=step, guards=guards)

    def commit(self, step: int) -> None:
        """Do nothing: rank 0 does it."""

    def after_step(self, step: int) -> None:
        """Do nothing: no thread runs beside training."""

    def finish(self, guards: GuardState) -> bool:  # noqa: ARG002 - as every coordinator
        """Return True at once; rank 0 does the rest, and knows whether the run was stopped."""
        return True

    def stopped(self) -> None:
        """Do nothing: rank 0 raises the error of a spent budget."""

    def close(self) -> None:
        """Do nothing: no thread runs beside training."""


# --------------------------------------------------------------------------------------------------
# The components of a learner on one rank: wired in `assembly.py`, used by `loop.py`.


class Publisher(Protocol):
    """Publishes new weights to actors; the real ones are in `weights/publish.py`."""

    def publish(
        self, model: nn.Module, version: PolicyVersion, *, free: Callable[[], None]
    ) -> object:
        """Publish the weights and wait for no actor; collective.

        Calls `free` when the model may change again.
        """
        ...


@dataclass(frozen=True, slots=True)
class Teachers:
    """The teachers that are in the learner."""

    policies: tuple[Policy, ...] = ()
    """Frozen, in the order of `algorithm.teachers`."""
    prompt: TeacherPrompt = prompt_of_episode
    """Returns what they read before a completion."""


@dataclass(frozen=True, slots=True)
class RankComponents:
    """The components of one rank."""

    run: RunSettings
    learner: LearnerSettings
    algorithm: AlgorithmSettings
    start: StartState
    ranks: Ranks
    coordinator: Coordinator
    policy: Policy
    optimizer: ScheduledOptimizer
    guard: Guard
    checkpoints: Checkpoints
    publisher: Publisher
    reference: Policy | None = None
    """The frozen policy that the KL penalty is taken to; None = no penalty."""
    teachers: Teachers = Teachers()
    critic: Critic | None = None
    """Predicts the reward to come, where `algorithm.advantage` needs it; else None."""
    stopping: threading.Event = field(default_factory=threading.Event)
    """Set when the learner is asked to stop."""
    leave: Leave | None = None
    """Ends the process once a stop has left a batch; None = the loop ends instead."""
    are_all_told: bool = False
    """Whether whoever asks one of several ranks to stop asks all of them."""
    grace_s: float = 30.0
    """Seconds after which a learner that was asked to stop is killed."""
