"""The learner's loop: claim -> train -> guard -> advance -> publish -> record -> checkpoint.

A batch that runs out of memory is trained by the next life, in smaller microbatches. Publishing
runs in the background until the model is needed again (`background_publish.py`), and a checkpoint
from the moment its tensors are copied (`checkpoint.py`).

Consumes sealed claims. Waits for episodes, and at the very end for the last evaluation; never for
an actor, a transfer of weights or an evaluation in between. All ranks run the same loop: what only
rank 0 does, and how the others learn of it, is behind the coordinator.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec
import structlog
import torch

from buffer.record.episode import Episode, PolicyVersion
from configs import durable
from configs.errors import CheckpointError, OutOfMemory, SettingsError
from configs.logging import bind_version
from learner.algorithm.microbatch import Microbatch
from learner.checkpointing.export import export_adapter, export_model
from learner.checkpointing.resume import roll_back
from learner.data.batch import BatchPlan, pack
from learner.data.evaluation import is_due
from learner.model.ranks import Ranks
from learner.model.sequence_cost import SequenceCost
from learner.reporting.metrics import StepTimes
from learner.training.guards import Alert
from learner.training.step import TrainedBatch, train_batch
from learner.weights.background_publish import BackgroundPublisher

from .coordinator import RankComponents
from .profiling import RECORDER, phase, stated_peak, take, traced, utilization
from .stopping import BatchHold, LeftBatch, write_left_batch

log = structlog.get_logger()

# --------------------------------------------------------------------------------------------------
# Tokens of a microbatch, halved from the batch on in which a rank ran out of memory.
#
#     out of memory -> memory.json, in the run's folder -> this life ends -> resume, the same batch
#
# A rank that runs out of memory in the middle of a pass leaves the others inside of collectives,
# and layers gathered: nothing of it can be taken up again in place. So it is written down, all
# ranks end, and the next life resumes at the checkpoint. The budget is a function of the batch
# alone: batches before this one are trained as they were, this one and all after it with half of
# the tokens.

MEMORY_FILE = "memory.json"
MOST_HALVINGS = 6
"""From 16,384 to 256 tokens; a microbatch has at least one episode, so less changes nothing."""


class MemoryBudget:
    """The budget of each batch; the same on every rank."""

    def __init__(self, run_folder: Path, tokens: int, ranks: Ranks) -> None:
        """Read the budgets that earlier lives wrote down; collective.

        Raises:
            CheckpointError: The file is not what `halve` writes.
        """
        self._file = run_folder / MEMORY_FILE
        self._tokens = tokens
        written = None
        if ranks.is_first:
            written = self._file.read_bytes() if self._file.exists() else b"[]"
        try:
            self._halved = msgspec.json.decode(ranks.broadcast(written), type=list[int])
        except msgspec.MsgspecError as error:
            raise CheckpointError(
                f"{self._file} must list the batches that ran out of memory, got other "
                f"content ({error}); remove it: the learner then begins with "
                "learner.microbatch_tokens again"
            ) from error

    def tokens(self, step: int) -> int:
        """Return the most tokens of a microbatch in batch `step`."""
        halvings = sum(batch <= step for batch in self._halved)
        return max(1, self._tokens >> halvings)

    def halve(self, step: int, error: Exception) -> None:
        """Write down that batch `step` ran out of memory, and raise; several ranks write the same.

        Raises:
            OutOfMemory: The next life has half of the budget, from this batch on.
            SettingsError: The budget has been halved `MOST_HALVINGS` times; nothing is written.
        """
        used = self.tokens(step)
        reason = str(error).splitlines()[0]
        if len(self._halved) >= MOST_HALVINGS:
            raise SettingsError(
                f"batch {step} must fit into memory after {MOST_HALVINGS} halvings of "
                f"learner.microbatch_tokens, got out of memory with microbatches of {used} tokens "
                f"({reason}); lower run.max_completion_tokens, or raise learner.ranks"
            ) from error
        durable.replace_file(self._file, msgspec.json.encode([*self._halved, step]))
        raise OutOfMemory(
            f"batch {step} must fit into memory, got out of memory with microbatches of {used} "
            f"tokens ({reason}); start the learner again, unless `nyala up` does: it then trains "
            f"the batch with microbatches of {used // 2}"
        ) from error


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether a GPU's or the CPU's allocator raised it."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


# --------------------------------------------------------------------------------------------------
# The learner's loop: claim -> train -> guard -> advance -> publish -> record -> checkpoint.

SWITCH_S = 5e-5
"""How soon the interpreter passes from claiming and packing to publishing, which needs it again
after each of some hundred short operations. Measured: the gather of 300 small tensors beside a
thread that decodes JSON takes 66 ms at Python's 5 ms, 39 ms at this, and 5 ms alone (9 runs,
two busy cores; the last is the least, the others are medians)."""


class Loop:
    """One learner, from its start state to the end of the run or a request to stop."""

    def __init__(self, components: RankComponents) -> None:
        self._components = components
        self._coordinator = components.coordinator
        self._guard = components.guard
        self._run = components.run
        self._step = components.start.state.step
        self._checkpointed = self._step if components.start.checkpoint is not None else None
        self._memory = MemoryBudget(
            self._run.folder, components.learner.microbatch_tokens, components.ranks
        )
        self._background = BackgroundPublisher(components.ranks.device)
        self._cost = SequenceCost.from_config(components.policy.causal_lm.config.to_dict())
        peak = stated_peak(components.ranks.device, self._run.dtype) or 0.0
        # The peak of the slowest card, so that all ranks agree whether there is one.
        least = -components.ranks.maximum(torch.tensor(-peak, dtype=torch.float64))
        self._peak_tflops = float(least) or None
        self._hold = BatchHold(
            components.stopping,
            components.leave,
            grace_s=components.grace_s,
            on_unsaved=self._note_left,
        )

    def run(self) -> bool:
        """Train until the run is done; False if asked to stop before.

        At the end rank 0 writes the model, and its adapters, into the run's folder.

        Raises:
            LostLineage: A newer learner owns the run.
            StoreError: The store refused, or was away for too long.
            OutOfMemory: A batch did not fit into memory; the next life has a smaller budget.
            SettingsError: It did not fit after all halvings of the budget either.
            DivergedError: The guards have rolled training back as often as they may.
            BudgetSpent: The run's actors have cost what they may.
            DeadlineError: A batch did not fill, or a checkpoint was not written, in time.
            CheckpointError: A checkpoint is damaged, or that of the end cannot be exported.
            NyalaError: Otherwise as `Coordinator.next_batch` and the publisher raise it.
        """
        try:
            self._publish()
            self._background.join()
            self._coordinator.start(self._step)
            RECORDER.begin_recording(self._components.ranks.device)
            while self._step < self._run.steps:
                with self._trace(self._step + 1):
                    is_trained = self._train_next()
                if not is_trained:
                    self._checkpoint()
                    self._components.checkpoints.under_way.wait()
                    self._coordinator.stopped()
                    return False
            return self._finish()
        except Exception as error:
            # A collective fails with ranks that have left; where all do, it is a stop.
            if isinstance(error, LeftBatch) or self._hold.has_left:
                return False
            raise
        finally:
            self._background.close()
            self._components.checkpoints.under_way.close()
            self._coordinator.close()
            self._hold.close()  # the last: until then a stop has its deadline

    def _trace(self, step: int) -> AbstractContextManager[None]:
        """Write a trace of a batch, if the settings name it."""
        if step not in self._components.learner.profile_steps:
            return contextlib.nullcontext()
        return traced(self._run.folder, step, rank=self._components.ranks.rank)

    def _train_next(self) -> bool:
        """Train one batch; False if asked to stop while waiting for it."""
        step = self._step + 1
        with _switch_interval(SWITCH_S):
            with phase("wait"):
                batch = self._coordinator.next_batch(step, self._memory.tokens(step))
            if batch is None:
                return False
            if step == self._components.start.state.step + 1:  # kernels are compiled as they run
                log.info("starting", stage="training the first batch")
            with phase("pack"):
                microbatches = self._pack(*batch)
                of_critic = self._pack(*batch, of_critic=True) if self._has_critic_budget else []
            with phase("gather"):
                self._background.wait()
        self._hold_state()
        trained = self._train(step, microbatches, of_critic)
        self._hold.release_state()
        self._step = step
        alerts = self._watch(trained)
        times = self._times(microbatches)
        self._coordinator.advance(self._step)
        is_repeatable = self._run.deterministic
        if self._is_publish_due() and not is_repeatable:
            self._publish()
        self._coordinator.record(trained, times, alerts)
        # One that is due while steps are being skipped waits for the first good batch.
        is_due_now = self._is_checkpoint_due() and not self._guard.has_skipped_step
        must = self._coordinator.must_checkpoint(
            self._step, has_skipped_step=self._guard.has_skipped_step
        )
        if must or is_due_now:
            self._checkpoint()
        if is_repeatable:  # no version that has been sampled from is ever taken back
            self._components.checkpoints.under_way.wait()
            self._publish()
        self._coordinator.after_step(self._step)
        return True

    @property
    def _has_critic_budget(self) -> bool:
        critic = self._components.critic
        return critic is not None and critic.settings.microbatch_tokens is not None

    def _pack(
        self, plan: BatchPlan, episodes: list[Episode], *, of_critic: bool = False
    ) -> list[Microbatch]:
        components = self._components
        return pack(
            plan,
            episodes,
            settings=components.algorithm,
            lineages=components.start.lineages,
            lineage=components.start.lineage,
            teacher_prompt=components.teachers.prompt,
            of_critic=of_critic,
        )

    def _train(
        self, step: int, microbatches: list[Microbatch], of_critic: list[Microbatch]
    ) -> TrainedBatch:
        components = self._components
        components.optimizer.rate_scale = self._guard.lr_scale
        try:
            return train_batch(
                components.policy,
                components.optimizer,
                step,
                microbatches,
                settings=self._guard.algorithm,
                ranks=components.ranks,
                reference=components.reference,
                teachers=components.teachers.policies,
                critic=components.critic,
                critic_microbatches=of_critic,
                before_step=self._hold.before_step,
            )
        except RuntimeError as error:
            if is_out_of_memory(error):
                self._memory.halve(step, error)
            raise

    def _times(self, microbatches: Sequence[Microbatch]) -> StepTimes:
        """Return the times of this batch. Collective where cards have a stated peak."""
        measured, ranks, mfu = take(), self._components.ranks, None
        if self._peak_tflops is not None:
            costs = [
                self._cost.of_packed(
                    microbatch.sequences.lengths,
                    microbatch.sequences.seen_lengths,
                    len(microbatch.indices_N),
                )
                for microbatch in microbatches
            ]
            total = float(ranks.sum(torch.tensor(costs, dtype=torch.float64).sum()))
            mfu = utilization(
                total * self._components.algorithm.num_epochs,
                measured.seconds,
                ranks=ranks.size,
                peak_tflops=self._peak_tflops,
            )
        return StepTimes(measured, mfu, self._peak_tflops)

    def _watch(self, trained: TrainedBatch) -> list[Alert]:
        """Have the guard judge a batch, and go back to older weights if it decides so."""
        alerts = self._guard.watch(trained)
        if self._guard.must_roll_back:
            components = self._components
            restored = roll_back(
                components.checkpoints,
                components.policy,
                components.optimizer,
                model_path=self._run.model_path,
                before=self._guard.state.restored_step,
                critic=components.critic,
            )
            self._guard.rolled_back(restored)
        return alerts

    def _is_publish_due(self) -> bool:
        """Whether actors are to get these weights; an evaluation waits for exactly them."""
        every = self._components.learner.publish_every
        return self._step % every == 0 or is_due(self._run, self._step)

    def _publish(self) -> None:
        components = self._components
        version = PolicyVersion(components.start.lineage, self._step)
        model = components.policy.causal_lm
        with phase("gather"):  # the publish before this one has to end first
            self._background.start(
                lambda free: components.publisher.publish(model, version, free=free)
            )
        bind_version(f"{version.lineage}.{version.step}")

    def _is_checkpoint_due(self) -> bool:
        """Whether a multiple of `checkpoint_every` has passed since the last checkpoint."""
        every = self._components.learner.checkpoint_every
        return self._step // every > (self._checkpointed or 0) // every

    def _checkpoint(self) -> None:
        """Begin a checkpoint, which is committed once it is durable; nothing if this step has one.

        The guards count it at once: a rollback waits until it is durable.
        """
        if self._checkpointed == self._step or not self._step:
            return
        components, step = self._components, self._step
        with phase("gather"):
            self._background.wait()  # its probe gathers the parameters that are copied here
        with phase("checkpoint"):
            components.checkpoints.under_way.wait()
            self._guard.checkpoints()
            state = self._coordinator.begin_checkpoint(step, self._guard.state)
            components.checkpoints.begin_save(
                state,
                components.policy,
                components.optimizer,
                then=lambda: self._coordinator.commit(step),
            )
        self._checkpointed = step

    def _hold_state(self) -> None:
        """Hold the present state, so that a stop in the coming batch saves it."""
        components, step = self._components, self._step
        if components.ranks.size > 1 and not components.are_all_told:
            return
        algorithm = components.algorithm
        kept = components.checkpoints.keep(
            step,
            components.policy,
            components.optimizer,
            copied=algorithm.num_epochs * algorithm.num_minibatches > 1,
        )
        guards = self._guard.state_to_save()

        def save(deadline: float) -> None:
            if components.ranks.is_first:
                write_left_batch(self._run.folder, step + 1)
            components.checkpoints.under_way.wait()
            if step and self._checkpointed != step:
                state = self._coordinator.begin_checkpoint(step, guards)
                components.checkpoints.save_kept(state, kept, deadline=deadline)
                self._coordinator.commit(step)
            components.ranks.in_background.barrier()  # none ends before rank 0 has committed

        self._hold.hold_state(save, is_copied=kept.is_copied)

    def _note_left(self) -> None:
        """Name the batch under way for the process that stops the run."""
        if self._components.ranks.is_first and self._step < self._run.steps:
            write_left_batch(self._run.folder, self._step + 1)

    def _finish(self) -> bool:
        """End the run: model, last evaluation, CANCEL, summary; False if asked to stop before."""
        self._checkpoint()
        self._background.join()
        self._components.checkpoints.under_way.wait()
        if self._components.ranks.is_first:
            saved = self._components.checkpoints.path_of(self._step)
            export_model(saved, self._run, self._run.folder / "model")
            if self._components.policy.adapter is not None:
                export_adapter(saved, self._run, self._run.folder / "adapter")
        return self._coordinator.finish(self._guard.state)


@contextlib.contextmanager
def _switch_interval(seconds: float) -> Iterator[None]:
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(usual_s)
