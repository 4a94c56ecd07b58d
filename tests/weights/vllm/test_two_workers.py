"""A version reaches both workers of a tensor-parallel vLLM, whichever way it comes.

Real vLLM on a CPU: core and workers are four processes with the test's. The learner's probe agrees
only where both workers have all of the version, for either computes a part of every token. The
member of weight groups is the first worker; other members are `actor_process.py`.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from pathlib import Path

import pytest

from actors.assembly import make_engine, runs_in_process
from actors.engine.threaded import ThreadedEngine
from actors.membership.worker_line import WorkerLine
from actors.weights.receiver import WeightReceiver
from configs.settings import ActorSettings, RunSettings, Settings
from tests.actors.support.engine_battery import swaps_under_load
from tests.actors.support.engine_probe import Bench, tiny_folder
from tests.actors.support.vllm_plugin import make_plugin_visible
from tests.weights.support.vllm_actor import TIMEOUT_S, QwenPlane, receiving

pytest.importorskip("vllm", reason="not installed")

SEND_S = 20.0
"""Of a broadcast, so that one which stands still can be looked at."""

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
    assert not runs_in_process(settings)
    line = WorkerLine()
    engine, _ = make_engine(settings, line)
    assert isinstance(engine, ThreadedEngine)
    plane = QwenPlane(folder, model=model, broadcast_send_s=SEND_S)
    try:
        await engine.start()
        await swaps_under_load(Bench(engine, model, folder))
        await asyncio.to_thread(plane.publish)
        async with receiving(engine, plane, "memory", "publisher") as receiver:
            await one_more(plane, receiver)
            assert receiver.counters.memory_reads == 2
        async with receiving(engine, plane, "publisher", place=line) as receiver:
            assert receiver.counters.pulls == 1
            await a_group_reaches_the_worker(plane, receiver)
            await a_member_that_dies_costs_no_version(plane, receiver)
    finally:
        await engine.close()
        plane.close()


async def a_group_reaches_the_worker(plane: QwenPlane, receiver: WeightReceiver) -> None:
    await asyncio.to_thread(plane.wait_until_groups_are_possible)
    await one_more(plane, receiver)
    assert receiver.counters.broadcasts >= 1
    before = receiver.counters
    await one_more(plane, receiver)

    assert receiver.counters.broadcasts == before.broadcasts + 1
    assert receiver.counters.pulls == before.pulls
    assert receiver.counters.probe_mismatches == 0
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("weights-")], "no member is here"


async def a_member_that_dies_costs_no_version(plane: QwenPlane, receiver: WeightReceiver) -> None:
    """Another actor dies in the midst of a broadcast: the worker leaves it, and joins the next."""
    victim = plane.actor("victim", is_blind=True, strike=signal.SIGKILL, nth=1)
    await asyncio.to_thread(victim.wait, "synced", timeout_s=TIMEOUT_S)
    await one_more(plane, receiver)
    await asyncio.to_thread(victim.process.join, TIMEOUT_S)
    assert victim.process.exitcode == -signal.SIGKILL

    before = receiver.counters
    await one_more(plane, receiver)
    assert receiver.counters.broadcasts == before.broadcasts + 1


async def one_more(plane: QwenPlane, receiver: WeightReceiver) -> None:
    """Publish a version and wait until the engine serves it: its probe has agreed then."""
    while receiver.version != plane.publication.version:
        await receiver.newer_than(receiver.version)
    manifest = await asyncio.to_thread(plane.publish)
    await receiver.newer_than(receiver.version)
    assert receiver.version == manifest.version
