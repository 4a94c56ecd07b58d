"""A copy of a live run's current weights, without an engine.

To the publisher it is a guest: it sends JOIN as an actor that can be in no group, pulls one
version, whose digest is checked, and leaves.
"""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path

from actors.weights.links import Caller, PublisherLink
from actors.weights.sources import WeightSources
from actors.weights.staging_files import StagingFile, StagingFiles
from actors.weights.transfer import FromPublisher, WeightTransfer
from broker.protocol.manifest import WeightManifest
from broker.protocol.messages import Publication
from broker.protocol.weight_messages import Join
from broker.transport.keys import KeyPair
from configs.errors import DeadlineError

from .file import save_weights


async def download(
    publication: Publication, path: Path, *, keys: KeyPair, run: str, timeout_s: float
) -> WeightManifest:
    """Pull the newest version into a safetensors file.

    Raises:
        DeadlineError: It has not come within `timeout_s`.
        WeightsError: Its digest cannot be had, or there is no room.
    """
    files = StagingFiles("download", fallback=path.parent)
    staged: asyncio.Future[tuple[WeightManifest, StagingFile]] = asyncio.Future()

    def stage(manifest: WeightManifest, file: StagingFile) -> None:
        if not staged.done():
            staged.set_result((manifest, file))

    def on_message(message: object) -> None:
        if isinstance(message, FromPublisher):
            transfer.on_message(message)

    caller = Caller(keys, run, f"download-{secrets.token_hex(4)}")
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
            f"{timeout_s:g} s, got nothing whole; is the run alive, and the address reachable?"
        ) from None
    except ExceptionGroup as group:
        raise group.exceptions[0] from group  # the first one has cancelled the other task
    finally:
        files.close()
    return manifest
