"""vLLM's core and worker in processes of their own, as on a GPU: just as exact.

And when the core is killed: not a token that it handed over is lost, and nobody waits for it.
"""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from typing import Any, cast

import pytest

from configs.errors import EngineDied
from tests.actors.support.engine_battery import (
    TOLERANCE,
    aborts,
    overflow_starts_fresh,
    overwritten_weights_make_no_token,
    recomputes_kv,
    refuses_a_torn_file,
    swaps_under_load,
    switch_at_one_token,
)
from tests.actors.support.engine_probe import Bench, tiny_folder
from tests.needs import needs
from tests.waiting import is_alive, wait_until

pytestmark = [
    pytest.mark.live,
    needs("vLLM"),
    pytest.mark.timeout(600),  # three interpreters import vLLM, one after the other
    pytest.mark.filterwarnings("ignore"),  # vLLM and what it imports warn of themselves
]

NOTICED_S = 5.0


def fork_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have vLLM fork its core, as on a card; on a CPU it spawns one whatever it is told."""
    from vllm.v1.engine import utils

    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")  # for a fork `prepare_environment` is too late
    monkeypatch.setattr(utils, "get_mp_context", lambda: multiprocessing.get_context("fork"))


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_swaps_reach_a_core_in_another_process(tmp_path, monkeypatch, method):
    from actors.engine.vllm_engine import vllm_engine
    from actors.engine.vllm_options import VllmOptions

    if method == "fork":
        fork_cores(monkeypatch)
    model = tiny_folder(tmp_path / "model", tied=True)

    async def story() -> None:
        options = VllmOptions(
            str(tmp_path / "model"),
            max_model_len=256,
            max_concurrent=64,
            in_process=False,
            recompute_kv=True,
        )
        engine = vllm_engine(options)
        await engine.start()
        bench = Bench(engine, model, tmp_path)
        try:
            await swaps_under_load(bench)
            await switch_at_one_token(bench)
            await recomputes_kv(bench)
            await overflow_starts_fresh(bench)
            await aborts(bench)
            await refuses_a_torn_file(bench)
            await overwritten_weights_make_no_token(bench)
            await loses_its_core(bench)
        finally:
            await engine.close()

    asyncio.run(story())
    gc.collect()  # vLLM leaves a ZeroMQ context, which warns of itself: here that is ignored


ACTOR = """
import asyncio, json, multiprocessing, os, socket, sys
import uvloop
from actors.engine.vllm_engine import vllm_engine
from actors.engine.vllm_options import VllmOptions
from vllm.v1.engine import utils

utils.get_mp_context = lambda: multiprocessing.get_context("fork")

async def story():
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listener.getsockname(), timeout=30)
    accepted, _ = listener.accept()
    own = {os.readlink(f"/proc/self/fd/{each.fileno()}") for each in (listener, client, accepted)}
    engine = vllm_engine(VllmOptions(sys.argv[1], max_model_len=64, in_process=False))
    await engine.start()
    (core,) = engine._stepper._watch._processes
    files = {os.readlink(f"/proc/{core.pid}/fd/{n}") for n in os.listdir(f"/proc/{core.pid}/fd")}
    accepted.close()
    print(json.dumps([core.pid, sorted(own & files), client.recv(1).hex()]), flush=True)
    await asyncio.Event().wait()

with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    runner.run(story())
"""


def test_a_forked_core_has_no_file_of_its_actor_and_ends_with_it(tmp_path):
    tiny_folder(tmp_path / "model", tied=True)
    actor = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", ACTOR, str(tmp_path / "model")],
        env=os.environ | {"TORCH_COMPILE_DISABLE": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert actor.stdout is not None
        line = next(line for line in actor.stdout if line.startswith("[") and "INFO" not in line)
        core, shared, heard = json.loads(line)
        assert shared == []
        assert heard == ""
        assert is_alive(core)
    finally:
        actor.kill()
        actor.communicate()

    wait_until(lambda: not is_alive(core))


async def loses_its_core(bench: Bench) -> None:
    """Kill the core in the middle of its requests."""
    stepper = cast(Any, bench.engine._stepper)
    engine, (core,) = stepper._engine, stepper._watch._processes
    made = recorded(engine.engine_core.decoder)
    transcripts = bench.submit(*[bench.request(max_tokens=200) for _ in range(12)])
    await bench.read(lambda: all(len(t.token_ids) > 16 for t in transcripts))

    os.kill(core.pid, signal.SIGKILL)
    killed_at = time.monotonic()
    with pytest.raises(EngineDied, match="core must keep running, got its exit with code -9"):
        await bench.read(lambda: False)

    assert time.monotonic() - killed_at < NOTICED_S
    assert engine.engine_core.outputs_queue.empty()
    assert len(made) == len(transcripts)
    for transcript, name in zip(transcripts, sorted(made, key=int), strict=True):
        assert transcript.token_ids == made[name]
        assert bench.log_ratio(transcript).abs().max() < TOLERANCE


def recorded(decoder: Any) -> dict[str, list[int]]:
    """Keep a copy of every token that a core hands over from now on, by request."""
    made: dict[str, list[int]] = {}
    decode = decoder.decode

    def keep(frames: Any) -> Any:
        outputs = decode(frames)
        for output in outputs.outputs:
            made.setdefault(output.request_id, []).extend(output.new_token_ids)
        return outputs

    decoder.decode = keep
    return made
