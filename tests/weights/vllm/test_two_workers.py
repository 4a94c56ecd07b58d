"""A version reaches both workers of a tensor-parallel vLLM, whichever way it comes.

Real vLLM on a CPU: core and workers are four processes with the test's. The learner's probe agrees
only where both workers have all of the version, for either computes a part of every token. The
member of weight groups is the first worker; other members are `actor_process.py`.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from actors.engine.threaded import ThreadedEngine
from actors.engine_of_settings import make_engine, runs_in_process
from actors.weights.receiver import WeightReceiver
from actors.weights.worker_line import WorkerLine
from configs.errors import EngineDied
from configs.settings import ActorSettings, RunSettings, Settings
from lab.actor_fleet import descendants
from tests.actors.support.engine_battery import swaps_under_load
from tests.actors.support.engine_probe import Bench, tiny_folder
from tests.needs import needs
from tests.waiting import until
from tests.weights.support.plane import JOIN_AND_SEND_S, SLACK_S
from tests.weights.support.vllm_actor import TIMEOUT_S, QwenPlane, one_more, receiving

TRIES = 3
SEND_S = 20.0
"""Of a broadcast, so that one which stands still can be looked at."""

pytestmark = [
    pytest.mark.live,
    needs("vLLM"),
    pytest.mark.timeout(600),  # four interpreters import vLLM
    pytest.mark.filterwarnings("ignore"),  # vLLM and what it imports warn of themselves
]


def test_versions_reach_both_workers_by_every_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.run(story(tmp_path))
    gc.collect()  # what vLLM has not closed of a dead core warns of itself, here and not later


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
        bench = Bench(engine, model, folder)
        await swaps_under_load(bench)
        await asyncio.to_thread(plane.publish)
        async with receiving(engine, plane, "memory", "publisher") as receiver:
            await one_more(plane, receiver)
            assert receiver.counters.memory_reads == 2
        async with receiving(engine, plane, "publisher", place=line) as receiver:
            assert receiver.counters.pulls == 1
            await a_group_reaches_the_worker(plane, receiver)
            await a_member_that_dies_costs_no_version(plane, receiver)
            await a_worker_that_dies_costs_the_others_no_more(bench, plane, receiver)
            await until(lambda: not line.is_open)
    finally:
        await engine.close()
        plane.close()


async def a_group_reaches_the_worker(plane: QwenPlane, receiver: WeightReceiver) -> None:
    await asyncio.to_thread(plane.wait_until_groups_are_possible)
    await one_more(plane, receiver)
    assert receiver.counters.broadcasts >= 1
    for _ in range(TRIES):  # on busy cores a group may form too late for a version, which is pulled
        before = receiver.counters
        await one_more(plane, receiver)
        if receiver.counters.pulls == before.pulls:
            break

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


async def a_worker_that_dies_costs_the_others_no_more(
    bench: Bench, plane: QwenPlane, receiver: WeightReceiver
) -> None:
    """A broadcast stands still: generation goes on beside it. Then the worker in it is killed.

    Gloo broadcasts in a tree, members in the order of their names: the worker is behind the first.
    """
    other = plane.actor("other", is_blind=True)
    still = plane.actor("a-still", is_blind=True, strike=signal.SIGSTOP, nth=1)
    for actor in (other, still):
        await asyncio.to_thread(actor.wait, "synced", timeout_s=TIMEOUT_S)
    manifest = await asyncio.to_thread(plane.publish)
    await until(lambda: is_stopped(still.pid))
    await bench.finish(bench.submit(*[bench.request(max_tokens=20) for _ in range(8)]))
    assert receiver.version < manifest.version, "the broadcast must stand still in the worker"

    (first,) = [
        pid for pid, words in descendants(os.getpid()).items() if "VLLM::Worker_TP0" in words[0]
    ]
    os.kill(first, signal.SIGKILL)
    with pytest.raises(EngineDied):
        await bench.read(lambda: False)
    began = time.monotonic()
    following = await asyncio.to_thread(plane.publish)
    await asyncio.to_thread(other.applied, following, timeout_s=TIMEOUT_S)
    assert time.monotonic() - began < SEND_S + JOIN_AND_SEND_S + SLACK_S


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
