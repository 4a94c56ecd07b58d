"""A real vLLM engine with a real receiver, in the test's process, and a plane for its model.

As an actor has them, without the loop that leases episodes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from transformers import Qwen3ForCausalLM

from actors.engine.engine import Engine
from actors.weights.links import ActorIdentity
from actors.weights.receiver import WeightReceiver
from broker.protocol.manifest import WeightManifest
from broker.transport.keys import load_pair
from configs.errors import EngineError
from configs.settings import ActorSettings
from tests.actors.support.tiny_model import perturb
from tests.weights.support.plane import Plane

TIMEOUT_S = 60.0


class QwenPlane(Plane):
    """A plane of the model that vLLM has too."""

    def publish(self, *, lineage: int = 1) -> WeightManifest:
        assert isinstance(self.model, Qwen3ForCausalLM)
        perturb(self.model, seed=self.step + 1)
        manifest: WeightManifest = self._seal(lineage)
        return manifest


@asynccontextmanager
async def receiving(
    engine: Engine, plane: Plane, *sources: Any, **options: Any
) -> AsyncIterator[WeightReceiver]:
    """Keep the engine on the plane's newest version, had from these sources."""
    receiver = WeightReceiver(
        engine,
        ActorSettings(weight_timeout_s=TIMEOUT_S, pull_from=sources),
        caller=ActorIdentity(load_pair(plane.keys, "actor"), "toy", f"vllm-{sources[0]}"),
        staging=plane.folder / "staging",
        **options,
    )
    running = asyncio.create_task(receiver.run())
    try:
        await receiver.first_sync(plane.publication)
        yield receiver
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError, EngineError):
            await running


async def one_more(plane: QwenPlane, receiver: WeightReceiver) -> None:
    """Publish a version and wait until the engine serves it: its probe has agreed then."""
    while receiver.version != plane.publication.version:
        await receiver.newer_than(receiver.version)
    manifest = await asyncio.to_thread(plane.publish)
    await receiver.newer_than(receiver.version)
    assert receiver.version == manifest.version
