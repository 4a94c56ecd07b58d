"""Digests of a checkpoint's files: taken while they are written, compared before they are loaded.

Every rank hashes what it writes, and its share of what is verified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import msgspec
from blake3 import blake3

from configs import durable
from configs.errors import CheckpointError
from learner.model.ranks import Ranks

from .folders import STATE
from .learner_state import LearnerState
from .manifest import MANIFEST, read_manifest

READ_BYTES = 2**24

Files = Mapping[str, Iterable[bytes | memoryview]]
"""A rank's files by name, in chunks."""
HashFiles = Callable[[Path, list[str]], dict[str, str]]


def verify(path: Path, hash_files: HashFiles | None = None) -> LearnerState:
    """Compare every byte of a checkpoint with its manifest and return its state.

    Whether this run wrote the manifest is not asked: `refuse_foreign` does that.

    Args:
        path: Folder of the checkpoint.
        hash_files: Hashes the named files in the folder; by default in this process.

    Raises:
        CheckpointError: A file or the manifest is missing, truncated or changed.
    """
    manifest = read_manifest(path)
    names = sorted(manifest.digests)
    digests = (hash_files or hash_here)(path, names)
    for name, digest in manifest.digests.items():
        if digests[name] != digest:
            raise CheckpointError(
                f"{path / name} must have the digest {digest[:12]}..., got "
                f"{digests[name][:12]}...; it was changed or cut short: restore the checkpoint "
                "from a copy, or use another one"
            )
    if STATE not in digests:
        raise CheckpointError(
            f"{path / MANIFEST} must list {STATE}, got no such file; restore the checkpoint from a "
            "copy, or use another one"
        )
    return LearnerState.decode((path / STATE).read_text(encoding="utf-8"))


def hash_here(path: Path, names: list[str]) -> dict[str, str]:
    """Hash files in this process.

    Raises:
        CheckpointError: A file cannot be read.
    """
    digests: dict[str, str] = {}
    for name in names:
        running = blake3(max_threads=blake3.AUTO)
        try:
            with (path / name).open("rb") as stream:
                while chunk := stream.read(READ_BYTES):
                    running.update(chunk)
        except (OSError, ValueError) as error:  # a name that no file can have is a ValueError
            raise CheckpointError(
                f"{path / name} must be a file that can be read, got {type(error).__name__} "
                f"({error}); restore the checkpoint from a copy, or use another one"
            ) from error
        digests[name] = running.hexdigest()
    return digests


def hash_on_all_ranks(ranks: Ranks, path: Path, names: list[str]) -> dict[str, str]:
    """Hash files, each on one of the ranks; every rank returns all digests. Collective.

    Raises:
        CheckpointError: A file cannot be read; on all ranks.
    """
    digests: dict[str, str] = {}
    reason = ""
    try:
        digests = hash_here(path, names[ranks.rank :: ranks.size])
    except CheckpointError as error:
        reason = str(error)
    digests, reason = gather_digests(ranks, digests, reason)
    if reason:
        raise CheckpointError(reason)
    return digests


def gather_digests(ranks: Ranks, local: dict[str, str], reason: str) -> tuple[dict[str, str], str]:
    """Merge the digests of all ranks; return them with the first reason for which one is missing.

    Collective.
    """
    digests: dict[str, str] = {}
    reasons: list[str] = []
    for message in ranks.gather(msgspec.msgpack.encode((local, reason))):
        theirs, why = msgspec.msgpack.decode(message, type=tuple[dict[str, str], str])
        digests |= theirs
        reasons += [why] if why else []
    return digests, reasons[0] if reasons else ""


def write_hashed(path: Path, chunks: Iterable[bytes | memoryview]) -> str:
    """Write a file durably, and return the BLAKE3 of the content that it should have."""
    running = blake3()

    def passing() -> Iterator[bytes | memoryview]:
        for chunk in chunks:
            running.update(chunk)
            yield chunk

    durable.DISK.write(path, passing())
    durable.DISK.sync(path)
    return running.hexdigest()


def write_files(folder: Path, files: Files, ranks: Ranks) -> tuple[dict[str, str], int]:
    """Write this rank's files; return the digests of all ranks' files, and this rank's bytes.

    Collective: when it returns, the first rank may have renamed the folder.

    Raises:
        OSError: A rank could not write its files; on all ranks.
    """
    digests: dict[str, str] = {}
    num_bytes = 0
    failure: OSError | None = None
    try:
        digests = {name: write_hashed(folder / name, chunks) for name, chunks in files.items()}
        num_bytes = sum((folder / name).stat().st_size for name in digests)
    except OSError as error:
        failure = error
    digests, reason = gather_digests(ranks, digests, str(failure) if failure else "")
    if failure is not None:
        raise failure
    if reason:
        raise OSError(f"another rank could not write its part of a checkpoint: {reason}")
    return digests, num_bytes
