"""Large records outside of Redis, in a folder or a bucket, named after task and content.

    broker: put_record -> submit(reference)
    learner: get -> train -> commit a checkpoint -> sweep

The object is written before the store gets its reference, so a reference always points to a whole
object. The object's name has the task and the SHA-256 of the record; the reference repeats digest
and length, and a reader checks both. An object without a reference (of an outdated submission, or a
group that was dropped or committed) is swept once it is too old for a submission under way.

Works with any filesystem of fsspec: `file://`, `s3://`, ... (`filesystems.py`).
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

import structlog

from configs.errors import RecordError, StoreUnreachable, quoted
from configs.settings import BufferSettings

from .filesystems import filesystem_at

log = structlog.get_logger()

MAGIC = b"\xc1object "  # no msgpack begins with 0xc1: a reference cannot be taken for a record
LONGEST_REFERENCE = 128
FOLDER_TASKS = 4096  # tasks that share a folder, few enough for a short listing

READ_PAUSES_S = (0.5, 1.0, 2.0)  # between attempts; then the bucket counts as away

Referenced = Callable[[Sequence[int]], list[bytes]]
"""Returns for each task its reference in the store, or another text."""

_REFERENCE = re.compile(re.escape(MAGIC) + rb"([0-9a-f]{64}) (\d{1,12})")
_NAME = re.compile(r"(\d+)-([0-9a-f]{64})")


def is_reference(record: bytes) -> bool:
    """Whether the store has a reference in place of the record."""
    return record.startswith(MAGIC)


class ObjectStore:
    """The large records of one run."""

    def __init__(self, url: str, run: str) -> None:
        """Find the filesystem; nothing is written yet.

        Raises:
            SettingsError: fsspec has no filesystem for the URL.
        """
        self._files, root = filesystem_at(url, setting="buffer.object_store")
        self._root = f"{root.rstrip('/')}/{run}"

    @classmethod
    def from_settings(cls, settings: BufferSettings, run: str) -> ObjectStore | None:
        """Open the store at `buffer.object_store`; None if every record goes into Redis."""
        return None if settings.object_store is None else cls(settings.object_store, run)

    def put_record(self, task_id: int, record: bytes) -> bytes:
        """Write a record, unless it is there whole, and return the reference for the store.

        Raises:
            OSError: The record could not be written; another attempt does no harm.
        """
        digest = hashlib.sha256(record).hexdigest()
        path = self._path(task_id, digest)
        # A complete object is never overwritten, because the learner may be reading it.
        if not self._files.exists(path) or self._files.size(path) != len(record):
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._files.pipe_file(path, record)
        return MAGIC + f"{digest} {len(record)}".encode()

    def get(self, task_id: int, reference: bytes) -> bytes:
        """Read the record that a reference points to.

        Raises:
            RecordError: The record is gone or changed, or this is no reference.
            StoreUnreachable: The object store did not answer, in several tries over seconds.
        """
        match = _REFERENCE.fullmatch(reference)
        if match is None:
            raise RecordError(
                f"a reference must hold SHA-256 and length, got {quoted(reference, 60)}; use the "
                "same release of Nyala on all machines"
            )
        digest, length = match[1].decode(), int(match[2])
        record = self._read(self._path(task_id, digest))
        if len(record) != length or hashlib.sha256(record).hexdigest() != digest:
            raise RecordError(
                f"the object of task {task_id} must have {length} bytes of SHA-256 {digest:.12}, "
                f"got {len(record)} bytes with another digest; it was changed or cut off: let "
                "nothing but this run write to buffer.object_store"
            )
        return record

    def sweep(self, referenced: Referenced, *, older_than_s: float) -> int:
        """Remove the objects without a reference in the store; return their number.

        Args:
            referenced: Reads the store; called after the listing, so that objects written meanwhile
                are not removed.
            older_than_s: Least age; a younger object may belong to a submission under way.

        Raises:
            OSError: The object store refused, or does not answer.
        """
        self._files.invalidate_cache()
        objects = [
            (int(name[1]), name[2], path)
            for path in self._files.find(self._root)
            if (name := _NAME.fullmatch(path.rpartition("/")[2]))
        ]
        records = referenced([task_id for task_id, _, _ in objects])
        garbage = [
            path
            for (_, digest, path), record in zip(objects, records, strict=True)
            if not record.startswith(MAGIC + digest.encode()) and self._age_s(path) >= older_than_s
        ]
        if garbage:
            self._files.rm(garbage)
            log.debug("swept objects", removed=len(garbage), kept=len(objects) - len(garbage))
        return len(garbage)

    def _read(self, path: str) -> bytes:
        for pause_s in (*READ_PAUSES_S, None):
            try:
                return bytes(self._files.cat_file(path))
            except FileNotFoundError:
                raise RecordError(
                    f"object {path} must exist, got none; let nothing but this run remove files "
                    "of buffer.object_store"
                ) from None
            except OSError as error:
                if pause_s is None:
                    raise StoreUnreachable(
                        f"object {path} must be readable, got: {error}; see that this process "
                        "reaches buffer.object_store and may read there"
                    ) from error
                time.sleep(pause_s)
        raise AssertionError("the last attempt returns or raises")

    def _age_s(self, path: str) -> float:
        modified: datetime = self._files.modified(path)
        if modified.tzinfo is None:
            modified = modified.replace(tzinfo=UTC)
        return (datetime.now(UTC) - modified).total_seconds()

    def _path(self, task_id: int, digest: str) -> str:
        return f"{self._root}/{task_id // FOLDER_TASKS}/{task_id}-{digest}"
