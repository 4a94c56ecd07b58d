"""A version reaches both workers of a tensor-parallel vLLM, whichever way it comes.

Real vLLM on a CPU: core and workers are four processes with the test's. The learner's probe agrees
only where both workers have all of the version, for either computes a part of every token.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from actors.assembly import make_engine
from actors.engine.threaded import ThreadedEngine
from actors.weights.receiver import WeightReceiver
from configs.settings import ActorSettings, RunSettings, Settings
from tests.actors.support.engine_battery import swaps_under_load
from tests.actors.support.engine_probe import Bench, tiny_folder
from tests.actors.support.vllm_plugin import make_plugin_visible
from tests.weights.support.vllm_actor import QwenPlane, receiving

pytest.importorskip("vllm", reason="not installed")

pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(600),  # four interpreters import vLLM
    pytest.mark.filterwarnings("ignore"),  # vLLM and what it imports warn of themselves
]


def test_versions_reach_both_workers_by_every_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_plugin_visible(tmp_path, monkeypatch)
    asyncio.run(story(tmp_path))


async def story(folder: Path) -> None:
    model = tiny_folder(folder / "model", tied=True)
    settings = Settings(
        run=RunSettings(
            model=str(folder / "model"), max_prompt_tokens=56, max_completion_tokens=200
        ),
        actors=ActorSettings(tensor_parallel_size=2, max_concurrent_episodes=64),
    )
    engine, _ = make_engine(settings)
    assert isinstance(engine, ThreadedEngine)
    plane = QwenPlane(folder, model=model)
    try:
        await engine.start()
        await swaps_under_load(Bench(engine, model, folder))
        plane.publish()

        async with receiving(engine, plane, "memory", "publisher") as receiver:
            await one_more(plane, receiver)
            assert receiver.counters.memory_reads == 2
        async with receiving(engine, plane, "publisher") as receiver:
            assert receiver.counters.pulls == 1
            await asyncio.to_thread(plane.wait_until_groups_are_possible)
            sent = receiver.counters.broadcasts
            await one_more(plane, receiver)
            assert receiver.counters.broadcasts == sent + 1
            assert receiver.counters.probe_mismatches == 0
    finally:
        await engine.close()
        plane.close()


async def one_more(plane: QwenPlane, receiver: WeightReceiver) -> None:
    """Publish a version and wait until the engine serves it: its probe has agreed then."""
    while receiver.version != plane.publication.version:
        await receiver.newer_than(receiver.version)
    manifest = await asyncio.to_thread(plane.publish)
    await receiver.newer_than(receiver.version)
    assert receiver.version == manifest.version
