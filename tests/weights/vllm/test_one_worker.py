"""A group reaches vLLM in the actor's process: received beside its steps, swapped between two."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from actors.engine.threaded import ThreadedEngine
from actors.engine_of_settings import line_to_worker, make_engine
from configs.settings import ActorSettings, RunSettings, Settings
from tests.actors.support.engine_probe import Bench, tiny_folder
from tests.needs import needs
from tests.weights.support.vllm_actor import QwenPlane, one_more, receiving

pytestmark = [
    pytest.mark.live,
    needs("vLLM"),
    pytest.mark.filterwarnings("ignore"),  # vLLM and what it imports warn of themselves
]


def test_a_group_reaches_an_engine_in_this_process(tmp_path: Path) -> None:
    asyncio.run(story(tmp_path))


async def story(folder: Path) -> None:
    model = tiny_folder(folder / "model", tied=True)
    settings = Settings(
        run=RunSettings(
            model=str(folder / "model"), max_prompt_tokens=56, max_completion_tokens=200
        ),
        actors=ActorSettings(max_concurrent_episodes=64),
    )
    line = line_to_worker(settings)
    assert line is None
    engine, _ = make_engine(settings, line)
    assert isinstance(engine, ThreadedEngine)
    plane = QwenPlane(folder, model=model)
    try:
        await engine.start()
        bench = Bench(engine, model, folder)
        await asyncio.to_thread(plane.publish)
        async with receiving(engine, plane, "publisher", place=line) as receiver:
            long = bench.submit(*[bench.request(max_tokens=150) for _ in range(8)])
            await asyncio.to_thread(plane.wait_until_groups_are_possible)
            await one_more(plane, receiver)
            await bench.finish(long)
            assert receiver.counters.broadcasts >= 2
            assert receiver.counters.probe_mismatches == 0
    finally:
        await engine.close()
        plane.close()
