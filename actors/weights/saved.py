"""Copies of a policy version in a safetensors file, out of a live run too, and their digests.

For `nyala weights`. The file's own order of tensors is not that of the wire, so the header names
the order, the version and the digest.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from actors.engine.wire_tensors import named_tensors
from broker.protocol.manifest import WeightManifest, digest_of
from broker.protocol.messages import Publication
from broker.protocol.weight_messages import Join
from broker.transport.keys import KeyPair
from buffer.record.episode import PolicyVersion
from configs import durable
from configs.errors import DeadlineError, WeightsError

from .links import ActorIdentity, PublisherLink
from .sources import WeightSources
from .staging_files import StagingFile, StagingFiles
from .transfer import FromPublisher, WeightTransfer

# --------------------------------------------------------------------------------------------------
# A policy version as a safetensors file that any tool can read, and the digest of such a file.


@dataclass(frozen=True, slots=True)
class WeightFile:
    """Header of a file, and the digest of its bytes."""

    version: PolicyVersion
    digest: str
    """Digest of the version that was pulled, from the header."""
    actual: str
    """Digest of the bytes that are in the file now."""


def save_weights(staged: Path, manifest: WeightManifest, path: Path) -> None:
    """Write staged wire bytes as safetensors, in place of an older file, once they are complete.

    Raises:
        WeightsError: The staged file cannot be read, or does not agree with the manifest.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".unfinished-{path.name}")
    tensors = dict(named_tensors(staged, manifest.tensors, manifest.num_bytes))
    header = {
        "format": "pt",
        "version": json.dumps(list(manifest.version)),
        "digest": manifest.digest,
        "order": json.dumps(list(tensors)),
    }
    save_file(tensors, unfinished, metadata=header)
    durable.DISK.sync(unfinished)
    durable.move(unfinished, path)


def read_weights(path: Path) -> WeightFile:
    """Digest the tensors of a file; the caller compares that with the digest in the header.

    Raises:
        WeightsError: The file was not written by `save_weights`.
    """
    try:
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
            lineage, step = json.loads(header["version"])
            order = json.loads(header["order"])
            actual = digest_of(_bytes_of(file.get_tensor(name)) for name in order)
            return WeightFile(PolicyVersion(lineage, step), header["digest"], actual)
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise WeightsError(
            f"{path} must be a file of `nyala weights pull`, got: {error!r}; pull it again"
        ) from error


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


# --------------------------------------------------------------------------------------------------
# A copy of a live run's current weights, without an engine.
#
# The download sends JOIN as an actor that can be in no group, pulls one version, and checks its
# digest.


async def download(
    publication: Publication, path: Path, *, keys: KeyPair, run: str, timeout_s: float
) -> WeightManifest:
    """Pull the newest version into a safetensors file, in place of an older one.

    Args:
        publication: Address of the publisher.
        path: File to write.
        keys: Keys of an actor that the publisher allows.
        run: Name of the run.
        timeout_s: Limit for the whole download.

    Returns:
        Manifest of the version that came, which may be newer than the publication.

    Raises:
        DeadlineError: The version has not come within `timeout_s`.
        WeightsError: The version never comes with its digest, or there is no room for it.
    """
    files = StagingFiles("download", fallback=path.parent)
    staged: asyncio.Future[tuple[WeightManifest, StagingFile]] = asyncio.Future()

    def stage(manifest: WeightManifest, file: StagingFile) -> None:
        if not staged.done():
            staged.set_result((manifest, file))

    def on_message(message: object) -> None:
        if isinstance(message, FromPublisher):
            transfer.on_message(message)

    caller = ActorIdentity(keys, run, f"download-{secrets.token_hex(4)}")
    link = PublisherLink(
        caller=caller,
        join=lambda: Join(transfer.held, can_group=False, device="cpu"),
        on_message=on_message,
    )
    sources = WeightSources(link.post, order=("publisher",), caller=caller)
    transfer = WeightTransfer(
        files, post=link.post, sources=sources, stage=stage, timeout_s=timeout_s
    )
    link.follow(publication)
    try:
        async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as tasks:
            working = [tasks.create_task(link.run()), tasks.create_task(transfer.run())]
            manifest, file = await staged
            for task in working:
                task.cancel()
        await asyncio.to_thread(save_weights, file.path, manifest, path)
    except TimeoutError:
        raise DeadlineError(
            f"weights {tuple(publication.version)} must arrive from {publication.endpoint} within "
            f"{timeout_s:g} s, got nothing whole; check that the run is up, that this machine "
            "reaches the address, and that the key is in the learner's keys/allowed"
        ) from None
    except ExceptionGroup as group:
        raise group.exceptions[0] from group  # the first one has cancelled the other task
    finally:
        files.close()
    return manifest
