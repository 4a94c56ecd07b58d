"""Checkpoints: written whole, verified whole, never changed.

Files in the folder of one (`folders.py` has the names of folders):

    tensors-<rank>.safetensors     that rank's pieces of model and optimizer, and of a critic
    random-<rank>.bin              states of its random number generators: CPU, then GPU
    state.json                     step, lineage, curriculum cursor, totals
    manifest.json                  BLAKE3 of all others, and a MAC of that; written last

A save copies what it needs into host memory; everything else happens in a thread while training
goes on, one save at a time:

    every rank: copy ─▶ write, hash, sync ─▶ digests to rank 0 ─▶ wait ────────────────▶ `then`
    rank 0:                                  manifest, sync, rename, remove old ones ─▶

The thread's collectives use a process group of their own. The checkpoint is durable on all ranks
before `then` runs, which COMMITs; whoever asks for the newest one waits for the thread first.

A checkpoint is loaded only if this run wrote it (`manifest.py`), and after every byte has been
compared with its manifest. One of another run stays where it is, is passed over, and does not count
as kept; `resume.py` makes it the run's own.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import structlog
from torch import Tensor

from configs import durable
from configs.errors import CheckpointError, DeadlineError
from configs.worker import Worker
from learner.model.lora import Adapter
from learner.model.policy import Policy
from learner.model.ranks import BACKGROUND_TIMEOUT, Ranks
from learner.reporting.journal import Journal
from learner.training.critic import Critic
from learner.training.optimizer import ScheduledOptimizer

from .bucket_copies import BucketCopies
from .folders import (
    STATE,
    UNFINISHED,
    complete_checkpoints,
    may_be_best,
    put_in_place,
    refuse_if_taken_over,
    restore_replaced,
    set_aside,
    step_of,
)
from .learner_state import LearnerState
from .manifest import (
    MANIFEST,
    ForeignCheckpoint,
    encode_manifest,
    is_own,
    read_manifest,
    refuse_foreign,
    run_key,
)
from .tensors import (
    PREFIX,
    SUFFIX,
    CheckpointedModel,
    HostCopies,
    Shards,
    TensorShard,
    encode_shards,
    make_moments,
    model_tensors,
    parts_of,
    random_state,
    restore_random_state,
)
from .verification import Files, hash_on_all_ranks, verify, write_files, write_hashed

# --------------------------------------------------------------------------------------------------
# Checks that a checkpoint fits the settings: what it was trained with, and what is asked for.


def adapter_of(path: Path) -> Adapter | None:
    """Read the identity of a checkpoint's adapters; None = it has the weights themselves.

    Raises:
        CheckpointError: Its `state.json` is not a learner's state, or is one of another schema.
    """
    return LearnerState.decode((path / STATE).read_text(encoding="utf-8")).adapter


def check_adapter(path: Path, wanted: Adapter | None) -> None:
    """Refuse a checkpoint whose adapters differ from the policy's in rank, scale or base.

    Args:
        path: Folder of the checkpoint.
        wanted: Adapter of the policy; None = it has none.

    Raises:
        CheckpointError: The adapters differ, or only one of the two has any.
    """
    adapter = adapter_of(path)
    if adapter == wanted:
        return
    if adapter is not None and wanted is not None and adapter.base != wanted.base:
        raise CheckpointError(
            f"{path} must have adapters of the run's model, whose digest is {wanted.base[:12]}, "
            f"got those of {adapter.base[:12]}; restore run.model, run.dtype and "
            "learner.base_dtype, or begin again with --fresh"
        )
    raise CheckpointError(
        f"{path} must be of {_lora_settings(wanted)}, got one of {_lora_settings(adapter)}; "
        "restore the settings, or begin again with --fresh"
    )


def check_critic(
    path: Path,
    part: CheckpointedModel,
    tensors: Mapping[str, Tensor],
    saved: Mapping[str, object],
    critic: Critic | None,
) -> None:
    """Refuse a checkpoint without the critic that the run has, or with one of the other kind.

    A critic in the checkpoint of a run that has none is no error.

    Args:
        path: Folder of the checkpoint.
        part: Part of the state that is loaded.
        tensors: Tensors of that part.
        saved: Names of the tensors in the checkpoint.
        critic: Critic of the run, if it has one.

    Raises:
        CheckpointError: The checkpoint has no critic of this kind.
    """
    if critic is not None and part.name == "critic" and not tensors.keys() <= saved.keys():
        raise CheckpointError(
            f"{path} must hold a critic of critic.kind = {critic.settings.kind}, got "
            "none of that kind; restore the settings of the critic, or begin again with --fresh"
        )


def _lora_settings(adapter: Adapter | None) -> str:
    if adapter is None:
        return "learner.lora_rank = 0"
    return f"learner.lora_rank = {adapter.rank} and lora_alpha = {adapter.alpha:g}"


# --------------------------------------------------------------------------------------------------
# A save in the background: one at a time, in a thread of its own, waited for with a deadline.

DEADLINE_S = 1.1 * BACKGROUND_TIMEOUT.total_seconds()
"""A collective that hangs has raised its own error by then."""


class BackgroundSave:
    """Runs one save after the other in a thread."""

    def __init__(self) -> None:
        self._worker: Worker | None = None

    def start(self, save: Callable[[], object]) -> None:
        """Save in the background; the previous save has been waited for."""
        assert self._worker is None, "a save is under way, and its copies are being written"
        context = contextvars.copy_context()  # its log lines carry the caller's fields
        self._worker = Worker(lambda: context.run(save), name="checkpoint").start()

    @property
    def is_under_way(self) -> bool:
        """Whether a save has not ended yet."""
        return self._worker is not None and self._worker.is_alive

    def check_last_save(self) -> None:
        """Raise the error that ended the last save, if there is one.

        Raises:
            BaseException: The error that the save raised.
        """
        if self._worker is not None:
            self._worker.raise_if_failed()

    def wait(self) -> None:
        """Wait until the last save has ended.

        Raises:
            DeadlineError: The save has not ended within `DEADLINE_S`.
            BaseException: The error that the save raised.
        """
        worker, self._worker = self._worker, None
        if worker is None:
            return
        worker.join(DEADLINE_S)
        if worker.is_alive:
            raise DeadlineError(
                f"a checkpoint must be written within {DEADLINE_S:.0f} s, got an unfinished one; "
                "look at the disk of the run's folder and at the other ranks' logs"
            )

    def close(self) -> None:
        """Wait for the end of a save under way, `DEADLINE_S` at most; its error is dropped."""
        with contextlib.suppress(Exception):  # the loop has ended, so an error has no use
            self.wait()


# --------------------------------------------------------------------------------------------------
# Checkpoints: written whole, verified whole, never changed.

log = structlog.get_logger()

END = b""
"""Broadcast in place of another checkpoint to verify."""
SIGN_OF_LIFE_S = 5.0
"""Between broadcasts to ranks that wait while rank 0 reads a copy from elsewhere."""


class Kept(NamedTuple):
    """The state after a batch, where it lies. Producer and consumer: `Checkpoints`."""

    tensors: Mapping[str, Tensor]
    is_copied: bool
    """Whether it is a copy, which optimizer steps do not change."""
    random: bytes
    """States of the random number generators."""
    adapter: Adapter | None


class Checkpoints:
    """The checkpoints of one run; every rank calls the same methods in the same order.

    Example:
        checkpoints.under_way.wait()
        checkpoints.begin_save(state, policy, optimizer, then=commit)
        ...  # training goes on
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        ranks: Ranks,
        critic: Critic | None = None,
        is_evaluated: Callable[[int], bool] = lambda _: False,
        copies: BucketCopies | None = None,
    ) -> None:
        """Remember the folder; nothing is read or written.

        Args:
            folder: Folder of the checkpoints; the run's key lies beside it.
            keep: Number of checkpoints to keep; each save removes older ones, except the best.
            ranks: All ranks; each of them calls the same methods.
            critic: Critic of the run, if it has one.
            is_evaluated: Whether the policy after a batch is evaluated, so that the best checkpoint
                stays.
            copies: Copies in a bucket, if there are any.
        """
        self._folder = folder
        self._is_evaluated = is_evaluated
        self._elsewhere = copies
        self._keep = keep
        self._ranks = ranks
        self._critic = critic
        self._copies = HostCopies()
        self._copied_step = 0
        """Batch after which the copies are the state."""
        self._bytes_per_s = math.inf
        """Speed at which this rank wrote its last files; infinite before the first."""
        self.under_way = BackgroundSave()
        """The save that `begin_save` started."""

    def save(self, state: LearnerState, policy: Policy, optimizer: ScheduledOptimizer) -> Path:
        """Write a checkpoint; it is durable when this returns, and so is its copy in a bucket.

        Checkpoints of this run beyond those to keep are removed. Collective.

        Raises:
            LostLineage: A later learner has begun; the checkpoint would replace one of its own.
            OSError: A rank could not write.
            Exception: The error that ended the previous save, if one did.
        """
        self.under_way.wait()
        state = replace(state, adapter=policy.adapter)
        files = self._files(policy, optimizer, copied=False)
        return self._write(state.encode(), state, files, self._ranks)

    def begin_save(
        self,
        state: LearnerState,
        policy: Policy,
        optimizer: ScheduledOptimizer,
        *,
        then: Callable[[], object],
    ) -> None:
        """Copy the contents of a checkpoint, and write it in the background, as `save` does.

        The previous checkpoint, whose copies are replaced, has been waited for. An error of the
        background is raised by the next wait for `under_way`; `then` is not called after one.

        Args:
            state: State besides the tensors; may change afterwards.
            policy: Policy; it and the critic may be trained when this returns.
            optimizer: Optimizer; it may take steps when this returns.
            then: Called in the background thread once the checkpoint is durable.
        """
        assert not self.under_way.is_under_way
        files = self._files(policy, optimizer, copied=True)
        self._copied_step = state.step
        encoded = replace(state, adapter=policy.adapter).encode()

        def write() -> None:
            self._write(encoded, state, files, self._ranks.in_background)
            then()

        self.under_way.start(write)

    def keep(
        self, step: int, policy: Policy, optimizer: ScheduledOptimizer, *, copied: bool
    ) -> Kept:
        """Note where the present state lies, which is whole until the next optimizer step.

        Called between batches: in the middle of a pass a model shows gathered parameters.

        Args:
            step: Batch after which it is the state.
            policy: Policy at rest.
            optimizer: Optimizer at rest.
            copied: Copy it, so that it outlasts optimizer steps, unless the checkpoint under way
                still needs the copies of an earlier batch, or this one has been copied for it.
        """
        parts = parts_of(policy, optimizer, self._critic)
        tensors = self._copies.find(parts, is_first=self._ranks.is_first)
        copied = copied and (step == self._copied_step or not self.under_way.is_under_way)
        if copied and step > 0:  # before the first batch there is nothing to save
            tensors = self._copies.copies_of(tensors, anew=step != self._copied_step)
            self._copied_step = step
        return Kept(tensors, copied, random_state(self._ranks.device), policy.adapter)

    def save_kept(self, state: LearnerState, kept: Kept, *, deadline: float = math.inf) -> Path:
        """Write the state that `keep` noted; the checkpoint is durable when this returns.

        Otherwise as `save`. The previous save has been waited for. Collective, of threads beside
        those that train.

        Args:
            state: State besides the tensors.
            kept: State that `keep` returned.
            deadline: Moment by which it has to be durable, of the monotonic clock.

        Raises:
            DeadlineError: At the speed of the last checkpoint it would be late; nothing is written.
            LostLineage: A later learner has begun.
            OSError: A rank could not write.
        """
        num_bytes = sum(tensor.nbytes for tensor in kept.tensors.values())
        needed_s, left_s = num_bytes / self._bytes_per_s, deadline - time.monotonic()
        if needed_s > left_s:
            raise DeadlineError(
                f"a checkpoint of {num_bytes / 1e9:.1f} GB must be written within the "
                f"{max(0.0, left_s):.1f} s that are left, got {needed_s:.1f} s at the speed of the "
                "last one; raise console.stop_timeout_s, or use a faster disk"
            )
        state = replace(state, adapter=kept.adapter)
        files = self._encode(self._copies.on_host(kept.tensors), kept.random)
        return self._write(state.encode(), state, files, self._ranks.in_background)

    def newest(self, before: int | None = None) -> tuple[Path, LearnerState] | None:
        """Find the newest checkpoint that can be trusted; None if there is none at all. Collective.

        With `before`, only checkpoints of earlier batches count. Newer ones that are damaged are
        set aside, so that they count no longer; where none can be trusted they stay, because a
        folder without any would restart the run from its beginning.

        Where the run has copies in a bucket, and `before` is None, a newer copy is read into the
        folder first, and the copy of the result is made whole.

        Raises:
            CheckpointError: There are checkpoints, and none of them can be trusted.
            OSError: The bucket does not answer.
            Exception: The error that ended the previous save, if one did.
        """
        self.under_way.wait()
        if not self._ranks.is_first:
            while (order := self._ranks.broadcast(None)) != END:
                path, names = msgspec.msgpack.decode(order, type=tuple[str, list[str]])
                with contextlib.suppress(CheckpointError):  # rank 0 reports it
                    hash_on_all_ranks(self._ranks, Path(path), names)
            chosen = self._ranks.broadcast(None).decode()
        else:
            copies = self._elsewhere if before is None else None
            if copies is not None:
                self._while_others_wait(partial(copies.fetch_newer, self._folder))
            newest = self._choose(before)
            if copies is not None and newest is not None:
                self._while_others_wait(partial(copies.complete, newest))
            chosen = str(newest) if newest is not None else ""
            self._ranks.broadcast(END)
            self._ranks.broadcast(chosen.encode())
        if not chosen:
            return None
        text = (Path(chosen) / STATE).read_text(encoding="utf-8")
        return Path(chosen), LearnerState.decode(text)

    def all(self) -> list[Path]:
        """List the complete checkpoints, oldest first."""
        return complete_checkpoints(self._folder)

    def path_of(self, step: int) -> Path:
        """Name the folder of a checkpoint after batch `step`, whether or not it exists."""
        return self._folder / f"step-{step:06d}"

    def load(self, path: Path, policy: Policy, optimizer: ScheduledOptimizer) -> None:
        """Load a verified checkpoint into policy, critic, optimizers and random number generators.

        The generators of a rank that the checkpoint does not have stay as they are. Collective.

        Raises:
            CheckpointError: It does not hold this model, or the adapters or the critic that the
                settings ask for.
        """
        shards = Shards(path)
        wanted: dict[str, Tensor] = {}
        check_adapter(path, policy.adapter)
        for part in parts_of(policy, optimizer, self._critic):
            tensors = model_tensors(part)
            check_critic(path, part, tensors, shards.shapes, self._critic)
            wanted |= tensors | make_moments(part, shards.shapes, shards.dtypes)
        shards.read(wanted)
        random = path / f"random-{self._ranks.rank}.bin"
        if random.exists():  # a run may resume with more ranks than it had
            restore_random_state(random.read_bytes(), self._ranks.device)

    def _files(self, policy: Policy, optimizer: ScheduledOptimizer, *, copied: bool) -> Files:
        """Collect the files that this rank writes."""
        parts = parts_of(policy, optimizer, self._critic)
        tensors = self._copies.find(parts, is_first=self._ranks.is_first)
        pieces = self._copies.on_host(tensors, copied=copied)
        return self._encode(pieces, random_state(self._ranks.device))

    def _encode(self, pieces: Mapping[str, TensorShard], random: bytes) -> Files:
        """Encode this rank's pieces and the states of its random number generators as files."""
        rank = self._ranks.rank
        return {
            f"{PREFIX}{rank}{SUFFIX}": encode_shards(pieces),
            f"random-{rank}.bin": [random],
        }

    def _write(self, encoded: str, state: LearnerState, files: Files, ranks: Ranks) -> Path:
        """Write a checkpoint; it is durable when this returns. Collective."""
        final = self.path_of(state.step)
        unfinished = self._folder / f"{UNFINISHED}{final.name}"
        if ranks.is_first:
            for leftover in self._folder.glob(f"{UNFINISHED}*"):
                durable.DISK.remove(leftover)
            durable.make_private_folder(self._folder)
            durable.make_folder(unfinished, mode=0o700)
        ranks.barrier()
        is_first = ranks.is_first
        with durable.removed_if_unwritten(unfinished) if is_first else contextlib.nullcontext():
            began = time.monotonic()
            digests, num_bytes = write_files(unfinished, files, ranks)
            self._bytes_per_s = num_bytes / max(1e-3, time.monotonic() - began)
            if is_first:
                digests[STATE] = write_hashed(unfinished / STATE, [encoded.encode()])
                manifest = encode_manifest(digests, run_key(self._folder.parent))
                write_hashed(unfinished / MANIFEST, [manifest])
                durable.DISK.sync(unfinished)
                refuse_if_taken_over(self._folder.parent, state.lineage)
                put_in_place(unfinished, final)
        if is_first:
            self._remove_old(final)
        ranks.barrier()
        if self._elsewhere is not None:
            stay = [path.name for path in self.all()] if ranks.is_first else []
            self._elsewhere.write(final, files, stay, ranks)
        return final

    def _choose(self, before: int | None) -> Path | None:
        """Choose the newest checkpoint that can be trusted; rank 0."""
        restore_replaced(self._folder)
        paths = [path for path in self.all() if before is None or step_of(path) < before]
        key = run_key(self._folder.parent) if paths else b""
        damaged: list[Path] = []
        reason = ""
        for path in reversed(paths):
            try:
                refuse_foreign(path, read_manifest(path), key)
                verify(path, self._hash_files)
            except CheckpointError as error:
                log.error(
                    "CHECKPOINT REFUSED, trying the one before", path=str(path), reason=str(error)
                )
                if not isinstance(error, ForeignCheckpoint):
                    damaged.append(path)
                reason = reason or str(error)
                continue
            for other in damaged:
                set_aside(other)
            return path
        if paths:
            raise CheckpointError(
                f"at least one checkpoint in {self._folder} must be intact and of this run, got "
                f"none of {len(paths)}; restore one from a copy, begin again with --fresh, or "
                f"clear the reason why the newest was refused: {reason}"
            )
        return None

    def _hash_files(self, path: Path, names: list[str]) -> dict[str, str]:
        self._ranks.broadcast(msgspec.msgpack.encode((str(path), names)))
        return hash_on_all_ranks(self._ranks, path, names)

    def _while_others_wait(self, action: Callable[[], object]) -> None:
        """Run a function on rank 0 while the other ranks, told to hash nothing, wait."""
        worker = Worker(action, name="copies").start()
        while worker.is_alive:
            self._hash_files(self._folder, [])
            worker.join(SIGN_OF_LIFE_S)
        worker.raise_if_failed()

    def _remove_old(self, saved: Path) -> None:
        """Remove all checkpoints of this run except the newest ones and the best."""
        key = run_key(self._folder.parent)
        others = [path for path in self.all() if path != saved and is_own(path, key)]
        scores = Journal(self._folder.parent).scores()
        for path in others[: max(0, len(others) + 1 - self._keep)]:
            if not may_be_best(path, [*others, saved], scores, self._is_evaluated):
                durable.DISK.remove(path)
