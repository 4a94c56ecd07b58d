"""Kept batches: the records of the last sealed batches, as files in the run's folder.

    sealed -> batches/000100.msgpack -> removed once `learner.keep_batches` newer ones are there

`nyala replay` trains on them without store and actors. The store deletes a record once its batch is
committed; a file has it as the actor made it, in its own codec, so a replay may shape rewards in
another way. Rank 0 writes, in a thread beside training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import structlog

from buffer.operations.values import StaleMask
from buffer.record.codec import decode_episode
from buffer.record.episode import Episode
from configs import durable
from configs.errors import RecordError
from configs.settings import Settings
from configs.worker import Worker

if TYPE_CHECKING:  # a claim loads torch, and a list of kept batches needs none
    from .claims import ClaimedBatch
    from .records import Records

log = structlog.get_logger()

FOLDER = "batches"
SUFFIX = ".msgpack"


@dataclass(frozen=True, slots=True)
class KeptBatch:
    """A sealed batch. Producer: rank 0 of a run. Consumer: every rank of a replay."""

    step: int
    mask: StaleMask | None
    """The mask that it was sealed with."""
    uses: Mapping[int, int]
    """Group that is trained again -> how often, this batch included."""
    records: tuple[bytes, ...]
    """Records of its episodes, in the order of the claim."""

    def episodes(self) -> list[Episode]:
        """Decode the episodes, as actors made them.

        Raises:
            RecordError: A record is malformed.
        """
        return [decode_episode(record) for record in self.records]


def kept_steps(run_folder: Path) -> list[int]:
    """List the batches that a run has kept, in order."""
    files = (run_folder / FOLDER).glob(f"*{SUFFIX}")
    return sorted(int(file.stem) for file in files if file.stem.isdecimal())


def read_kept(run_folder: Path, step: int) -> KeptBatch:
    """Read a batch from the file in which a run has kept it.

    Raises:
        RecordError: It is not kept, or its file is damaged.
    """
    file = _file(run_folder, step)
    try:
        return msgspec.msgpack.decode(file.read_bytes(), type=KeptBatch)
    except (OSError, msgspec.MsgspecError) as error:
        raise RecordError(
            f"{file} must be a batch that learner.keep_batches has kept, got {error}; replay other "
            "batches"
        ) from error


class BatchKeeper:
    """Writes each sealed batch of a run, and removes those that are too old."""

    def __init__(self, settings: Settings, records: Records, *, step: int) -> None:
        """Remove what an abandoned branch has kept.

        Args:
            settings: Folder of the run, and the number of batches to keep.
            records: Reads the records.
            step: Step at which the learner resumes.
        """
        self._run_folder, self._keep_newest = settings.run.folder, settings.learner.keep_batches
        self._records = records
        self._worker: Worker | None = None
        for later in kept_steps(self._run_folder):
            if later > step:
                durable.DISK.remove(_file(self._run_folder, later))

    def keep(self, batch: ClaimedBatch) -> None:
        """Read the records of a sealed batch, and write them beside training.

        Waits for the batch before. A disk that fails is logged, as is a store that has lost a
        record since it was claimed; training goes on.
        """
        if not self._keep_newest:
            return
        self.close()
        try:
            records = self._records.encoded([episode.task_id for episode in batch.sampled])
        except RecordError as error:
            log.warning("BATCH NOT KEPT", step=batch.step, reason=str(error))
            return
        kept = KeptBatch(batch.step, batch.mask, batch.uses, tuple(records))
        self._worker = Worker(lambda: self._write(kept), name="kept batches").start()

    def close(self) -> None:
        """Wait until the last batch is written."""
        if self._worker is not None:
            self._worker.join()

    def _write(self, batch: KeptBatch) -> None:
        try:
            encoded = msgspec.msgpack.encode(batch)
            durable.replace_file(_file(self._run_folder, batch.step), encoded)
            for step in kept_steps(self._run_folder)[: -self._keep_newest]:
                durable.DISK.remove(_file(self._run_folder, step))
        except OSError as error:
            log.warning("BATCH NOT KEPT", step=batch.step, reason=str(error))


def _file(run_folder: Path, step: int) -> Path:
    return run_folder / FOLDER / f"{step:06d}{SUFFIX}"
