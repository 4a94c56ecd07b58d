"""Checkpoints: written whole, verified whole, never changed.

Files in the folder of one (`folders.py` has the names of folders):

    __<rank>_*.distcp, .metadata   model and optimizer, and a critic with its own, one file for each
                                   rank (torch's distributed format)
    random-<rank>.bin              state of torch's random number generator
    state.json                     step, lineage, curriculum cursor, totals
    manifest.json                  SHA-256 of all others, and a MAC of that; written last

A checkpoint is loaded only if this run wrote it (`manifest.py`), and after every byte has been
compared with its manifest. One of another run stays where it is, is passed over, and does not count
as kept; `trust.py` makes it the run's own. Callers COMMIT to the store only after `save` has
returned.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import structlog
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from configs import durable
from configs.errors import CheckpointError
from learner.model.policy import Policy
from learner.model.ranks import Ranks
from learner.reporting.metrics import Totals
from learner.training.critic import Critic
from learner.training.guards import GuardState
from learner.training.optimizer import AdamWithSchedule

from .folders import (
    UNFINISHED,
    complete_checkpoints,
    put_in_place,
    restore_replaced,
    set_aside,
    step_of,
)
from .lineages import refuse_if_taken_over
from .manifest import (
    MANIFEST,
    ForeignCheckpoint,
    encode_manifest,
    is_own,
    read_manifest,
    refuse_foreign,
    run_key,
)

log = structlog.get_logger()

SCHEMA = 2
STATE = "state.json"
HASH_CHUNK_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class LearnerState:
    """The learner's state besides tensors. Producer and consumer: rank 0, of two learners."""

    run: str
    settings_hash: str
    step: int
    """Batches trained."""
    lineage: int
    """Of the learner that wrote it."""
    cursor: int
    """The curriculum's next group."""
    trained: tuple[tuple[int, int], ...]
    """Groups of all batches, as ranges [start, end): recovery asserts them."""
    totals: Totals
    guards: GuardState = field(default_factory=GuardState)

    def encode(self) -> str:
        """Encode as JSON."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1)

    @classmethod
    def decode(cls, text: str) -> LearnerState:
        """Decode what `encode` made.

        Raises:
            CheckpointError: It is not such a state.
        """
        try:
            if msgspec.json.decode(text, type=_Schema).schema != SCHEMA:
                raise CheckpointError(f"the checkpoint's schema must be {SCHEMA}")
            return msgspec.json.decode(text, type=cls)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{STATE} must be a learner's state, got: {error}") from error


class _Schema(msgspec.Struct):
    """The field that every state begins with."""

    schema: int


class Checkpoints:
    """The checkpoints of one run; every rank calls the same methods in the same order."""

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        ranks: Ranks,
        critic: Critic | None = None,
    ) -> None:
        """Take the folder as it is.

        Args:
            folder: Of checkpoints; the run's key lies beside it.
            keep: Number of checkpoints to keep.
            ranks: All of them call the same methods.
            critic: Of the run, if it has one.
        """
        self._folder = folder
        self._keep = keep
        self._ranks = ranks
        self._critic = critic

    def save(self, state: LearnerState, policy: Policy, optimizer: AdamWithSchedule) -> Path:
        """Write a checkpoint; it is durable when this returns.

        Raises:
            LostLineage: A later learner has begun; the checkpoint would take the place of its own.
        """
        final = self._folder / f"step-{state.step:06d}"
        unfinished = self._folder / f"{UNFINISHED}{final.name}"
        if self._ranks.is_first:
            for leftover in self._folder.glob(f"{UNFINISHED}*"):
                durable.DISK.remove(leftover)
            durable.make_private_folder(self._folder)
            durable.make_folder(unfinished, mode=0o700)
        self._ranks.barrier()

        self._save_tensors(unfinished, policy, optimizer)
        durable.DISK.write(unfinished / f"random-{self._ranks.rank}.bin", _random_state())
        self._ranks.barrier()
        if self._ranks.is_first:
            durable.DISK.write(unfinished / STATE, state.encode().encode())
            _seal(unfinished, run_key(self._folder.parent))
            refuse_if_taken_over(self._folder.parent, state.lineage)
            put_in_place(unfinished, final)
            self._remove_old(final)
        self._ranks.barrier()
        return final

    def newest(self, before: int | None = None) -> tuple[Path, LearnerState] | None:
        """Find the newest checkpoint that can be trusted; None if there is none at all.

        With `before`, only checkpoints of earlier batches count. Rank 0 only. Newer ones that are
        damaged are set aside, so that they count no longer; where none can be trusted they stay,
        because a folder without any would restart the run from its beginning.

        Raises:
            CheckpointError: There are checkpoints, and none of them can be trusted.
        """
        restore_replaced(self._folder)
        found = [path for path in self.all() if before is None or step_of(path) < before]
        key = run_key(self._folder.parent) if found else b""
        damaged: list[Path] = []
        reason = ""
        for path in reversed(found):
            try:
                refuse_foreign(path, read_manifest(path), key)
                state = verify(path)
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
            return path, state
        if found:
            raise CheckpointError(
                f"one of the {len(found)} checkpoints in {self._folder} must be intact and of "
                f"this run, got none; restore one from a copy, or begin again with --fresh. The "
                f"newest: {reason}"
            )
        return None

    def all(self) -> list[Path]:
        """List the complete checkpoints, oldest first."""
        return complete_checkpoints(self._folder)

    def load(self, path: Path, policy: Policy, optimizer: AdamWithSchedule) -> None:
        """Load a verified checkpoint into policy, critic, optimizers and random number generator.

        Raises:
            CheckpointError: It does not hold the critic that the settings ask for.
        """
        tensors = self._tensors(policy, optimizer)
        self._check_critic(path, tensors)
        load_tensors(
            tensors,
            checkpoint_id=path,
            process_group=self._ranks.control,
        )
        set_state_dict(
            policy,
            optimizer.adam,
            model_state_dict=tensors["model"],
            optim_state_dict=tensors["optimizer"],
        )
        if self._critic is not None:
            set_state_dict(
                self._critic.model,
                self._critic.optimizer.adam,
                model_state_dict=tensors["critic"],
                optim_state_dict=tensors["critic_optimizer"],
            )
        random = path / f"random-{self._ranks.rank}.bin"
        if random.exists():  # a run may resume with more ranks than it had
            torch.set_rng_state(torch.frombuffer(bytearray(random.read_bytes()), dtype=torch.uint8))

    def _save_tensors(self, folder: Path, policy: Policy, optimizer: AdamWithSchedule) -> None:
        save_tensors(
            self._tensors(policy, optimizer),
            checkpoint_id=folder,
            process_group=self._ranks.control,
        )

    def _tensors(self, policy: Policy, optimizer: AdamWithSchedule) -> dict[str, Any]:
        model, adam = get_state_dict(policy, optimizer.adam)
        tensors = {"model": model, "optimizer": adam}
        if self._critic is not None:
            model, adam = get_state_dict(self._critic.model, self._critic.optimizer.adam)
            tensors |= {"critic": model, "critic_optimizer": adam}
        return tensors

    def _check_critic(self, path: Path, tensors: dict[str, Any]) -> None:
        """Refuse a checkpoint of a run that had no critic, or one of the other kind."""
        if self._critic is None:
            return
        found = FileSystemReader(path).read_metadata().state_dict_metadata
        if not all(f"critic.{name}" in found for name in tensors["critic"]):
            raise CheckpointError(
                f"{path} must hold a critic of critic.kind = {self._critic.settings.kind}, got "
                "none; restore the setting, or begin again with --fresh"
            )

    def _remove_old(self, saved: Path) -> None:
        """Remove all of this run's but the newest; the one just saved counts as newest."""
        key = run_key(self._folder.parent)
        others = [path for path in self.all() if path != saved and is_own(path, key)]
        for path in others[: max(0, len(others) + 1 - self._keep)]:
            durable.DISK.remove(path)


def verify(path: Path) -> LearnerState:
    """Compare every byte of a checkpoint with its manifest and return its state.

    Raises:
        CheckpointError: A file is missing, truncated or changed.
    """
    expected = read_manifest(path).digests
    for name, digest in expected.items():
        try:
            found = _sha256(path / name)
        except (OSError, ValueError) as error:  # a name that no file can have is a ValueError
            raise CheckpointError(f"{path / name} must be readable, got: {error}") from error
        if found != digest:
            raise CheckpointError(
                f"{path / name} must have the SHA-256 {digest[:12]}..., got {found[:12]}...; "
                "it was changed or cut short"
            )
    if STATE not in expected:
        raise CheckpointError(f"{path / MANIFEST} must list {STATE}")
    return LearnerState.decode((path / STATE).read_text(encoding="utf-8"))


def _random_state() -> bytes:
    return torch.get_rng_state().numpy().tobytes()


def _seal(folder: Path, key: bytes) -> None:
    """Hash all files, write the manifest, and sync everything."""
    digests = {file.name: _sha256(file) for file in sorted(folder.iterdir())}
    durable.DISK.write(folder / MANIFEST, encode_manifest(digests, key))
    durable.sync_tree(folder)


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
