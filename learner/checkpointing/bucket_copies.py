"""Copies of checkpoints in a bucket, or in a folder on another disk: whole, or not there.

    <url>/<run>/checkpoints/step-000050/
        tensors-<rank>.safetensors, ...   every rank its own files
        state.json, manifest.json         rank 0
        COMMITTED                         rank 0, last: BLAKE3 of the manifest

Nothing without a COMMITTED object is read. What is read is compared with it, with the manifest, and
with the run's key like any checkpoint; the key itself never leaves the run's folder.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import structlog
from blake3 import blake3

from buffer.record.filesystems import filesystem_at
from configs import durable
from configs.errors import CheckpointError
from configs.settings import Settings
from learner.model.ranks import Ranks

from .folders import STATE, UNFINISHED, complete_checkpoints, put_in_place, step_of
from .manifest import MANIFEST, read_manifest
from .verification import verify

log = structlog.get_logger()
T = TypeVar("T")

COMMITTED = "COMMITTED"
CHUNK_BYTES = 2**26
PAUSES_S = (1.0, 4.0, 15.0)
"""Between attempts, beside those of the library: after the last a bucket is not just slow."""


class BucketCopies:
    """The copies of one run's checkpoints in a bucket.

    Args:
        url: Address of the bucket, as fsspec writes it.
        run: Name of the run.

    Raises:
        SettingsError: No filesystem for the URL is installed.
    """

    def __init__(self, url: str, run: str) -> None:
        self._files, root = filesystem_at(url, setting="learner.checkpoint_url")
        self._root = f"{root.rstrip('/')}/{run}/checkpoints"

    @classmethod
    def from_settings(cls, settings: Settings) -> BucketCopies | None:
        """Make the copies that the settings ask for; None if they ask for none."""
        url = settings.learner.checkpoint_url
        return None if url is None else cls(url, settings.run.name)

    def write(
        self, checkpoint: Path, files: Iterable[str], stay: Iterable[str], ranks: Ranks
    ) -> None:
        """Copy a checkpoint; the copy counts when this returns, on all ranks. Collective.

        Args:
            checkpoint: Folder of a durable checkpoint.
            files: Names of the files of the checkpoint that this rank wrote.
            stay: Names of the copies to keep; all others are removed.
            ranks: All ranks.

        Raises:
            OSError: A rank could not write.
        """
        _on_all(ranks, lambda: self._uncommit(checkpoint.name) if ranks.is_first else None)
        _on_all(ranks, lambda: self._put(checkpoint, files))
        _on_all(ranks, lambda: self._finish(checkpoint, stay) if ranks.is_first else None)

    def complete(self, checkpoint: Path) -> None:
        """Copy a checkpoint unless there is a whole copy: the learner may have died before it.

        A copy of that name with other content is replaced.

        Raises:
            CheckpointError: The manifest of the checkpoint cannot be read.
            OSError: The copy cannot be written.
        """
        mark = self._marker_path(checkpoint.name)
        if _retried(lambda: self._files.exists(mark)):
            committed = bytes(_retried(lambda: self._files.cat_file(mark)))
            if committed == _digest(checkpoint):
                return
            self._uncommit(checkpoint.name)
        self._put(checkpoint, read_manifest(checkpoint).digests)
        self._commit(checkpoint)

    def fetch_newer(self, folder: Path) -> None:
        """Read the newest copy into the folder of checkpoints, if it is newer than those there.

        An unfinished copy is passed over, and so is a damaged one, which is logged: the one before
        is read instead, as long as it is newer than those in the folder.

        Raises:
            CheckpointError: A copy is damaged, none is intact, and the folder has no checkpoint.
            OSError: The bucket does not answer.
        """
        refused, newest = "", max(map(step_of, complete_checkpoints(folder)), default=0)
        for name, is_committed in reversed(self._list_copies().items()):
            if step_of(Path(name)) <= newest:
                return
            if not is_committed:
                log.warning("the copy of a checkpoint is unfinished and is skipped", name=name)
                continue
            log.info("reading a checkpoint from its copy", name=name)
            try:
                self._fetch(name, folder)
            except CheckpointError as error:
                refused = refused or str(error)
                log.error("COPY OF A CHECKPOINT REFUSED, trying the one before", reason=str(error))
            else:
                return
        if refused and not newest:
            raise CheckpointError(
                f"at least one copy in {self._root} must be intact, got none; restore one, give "
                "the run another name to begin anew, or clear the reason why the newest was "
                f"refused: {refused}"
            )

    def _fetch(self, name: str, folder: Path) -> None:
        """Read a whole copy, verify it, and move it into its place.

        Raises:
            CheckpointError: A file of it is missing or changed.
        """
        unfinished = folder / f"{UNFINISHED}{name}"
        durable.DISK.remove(unfinished)
        durable.make_private_folder(folder)
        durable.make_folder(unfinished, mode=0o700)
        with durable.removed_if_unwritten(unfinished):
            self._fetch_files(name, unfinished)
            verify(unfinished)
            durable.sync_tree(unfinished)
            put_in_place(unfinished, folder / name)

    def _fetch_files(self, name: str, unfinished: Path) -> None:
        try:
            self._fetch_file(name, MANIFEST, unfinished)
            committed = _retried(lambda: self._files.cat_file(self._marker_path(name)))
            if _digest(unfinished) != bytes(committed):
                raise CheckpointError(
                    f"{name}/{MANIFEST} must be the one that was committed, got another digest; "
                    "restore or delete this copy"
                )
            for file in read_manifest(unfinished).digests:
                self._fetch_file(name, file, unfinished)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{name} must be complete in {self._root}, got one without a file ({error}); "
                "restore or delete this copy"
            ) from error

    def _list_copies(self) -> dict[str, bool]:
        """List the copies in the bucket, oldest first: name -> whether it has COMMITTED."""
        self._files.invalidate_cache()
        counts: dict[str, bool] = {}
        for path in _retried(lambda: self._files.find(self._root)):
            *_, name, file = path.split("/")
            if name.removeprefix("step-").isdecimal():
                counts[name] = counts.get(name, False) or file == COMMITTED
        return dict(sorted(counts.items(), key=lambda item: step_of(Path(item[0]))))

    def _put(self, checkpoint: Path, names: Iterable[str]) -> None:
        place = self._copy_path(checkpoint.name)
        _retried(lambda: self._files.makedirs(place, exist_ok=True))
        for name in names:
            here, there = str(checkpoint / name), f"{place}/{name}"
            _retried(partial(self._files.put_file, here, there))

    def _commit(self, checkpoint: Path) -> None:
        self._put(checkpoint, [MANIFEST])
        _retried(
            lambda: self._files.pipe_file(self._marker_path(checkpoint.name), _digest(checkpoint))
        )

    def _finish(self, checkpoint: Path, stay: Iterable[str]) -> None:
        """Mark a copy as whole, and remove all copies that are not to stay."""
        self._put(checkpoint, [STATE])
        self._commit(checkpoint)
        for name in self._list_copies().keys() - {checkpoint.name, *stay}:
            self._uncommit(name)  # first, so that a half of it never counts
            self._remove(self._copy_path(name))

    def _uncommit(self, name: str) -> None:
        self._remove(self._marker_path(name))

    def _remove(self, path: str) -> None:
        """Remove an object, or all below a folder; nothing may be left after an answer was lost."""
        with suppress(FileNotFoundError):
            _retried(lambda: self._files.rm(path, recursive=True))

    def _marker_path(self, name: str) -> str:
        return f"{self._copy_path(name)}/{COMMITTED}"

    def _copy_path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _fetch_file(self, name: str, file: str, folder: Path) -> None:
        if Path(file).name != file:
            raise CheckpointError(
                f"{name}/{MANIFEST} must name files without a folder, got {file!r}; restore or "
                "delete this copy"
            )
        path = f"{self._copy_path(name)}/{file}"
        size = _retried(lambda: int(self._files.size(path)))
        with (folder / file).open("wb") as stream:
            for start in range(0, size, CHUNK_BYTES):
                end = min(size, start + CHUNK_BYTES)
                stream.write(_retried(partial(self._files.cat_file, path, start=start, end=end)))


def _digest(checkpoint: Path) -> bytes:
    """Return the content of a checkpoint's COMMITTED object."""
    return blake3((checkpoint / MANIFEST).read_bytes()).hexdigest().encode()


def _on_all(ranks: Ranks, action: Callable[[], object]) -> None:
    """Do something on this rank, and raise on all where it fails on one; collective."""
    reason = ""
    try:
        action()
    except OSError as error:
        reason = str(error) or type(error).__name__
    reasons = [message.decode() for message in ranks.gather(f" {reason}".encode())]
    if failed := [text for text in reasons if text.strip()]:
        raise OSError(f"the copy of a checkpoint cannot be written:{failed[0]}")


def _retried(call: Callable[[], T]) -> T:
    """Call again after a pause while the bucket does not answer."""
    for pause_s in PAUSES_S:
        try:
            return call()
        except FileNotFoundError:
            raise
        except OSError as error:
            log.warning("the bucket of checkpoints does not answer", reason=str(error))
            time.sleep(pause_s * random.uniform(0.5, 1.5))
    return call()
