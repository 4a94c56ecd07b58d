"""The broker as a process: killed and restarted, stopped cleanly, refused with exit code 2."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from broker.protocol.messages import LeaseRequest, Verdict
from buffer import operations
from buffer.store import AsyncStore
from configs.errors import StoreError
from configs.settings import Settings
from console.run.redis_server import free_port
from tests.broker.support.broker_process import process
from tests.broker.support.records import submission
from tests.broker.support.ring import FIRST, GROUP, RUN, Ring, begin, hello, ring
from tests.conftest import find_redis_server
from tests.waiting import still_waits, until

pytestmark = pytest.mark.slow


def test_actors_continue_when_the_broker_is_killed_and_restarted(
    redis_url: str, run_settings: Settings
) -> None:
    async def story() -> None:
        store = AsyncStore(redis_url, RUN)
        await begin(store, groups=40)
        here = Ring(store, run_settings.broker.endpoint, run_settings.run.folder / "keys")
        actor = here.client("actor-1")
        done: list[Verdict] = []
        halfway = asyncio.Event()

        async def work() -> None:
            await actor.hello(hello("actor-1"))
            while len(done) < 40 * GROUP:
                for lease in (await actor.lease(LeaseRequest(4, FIRST))).leases:
                    done.append((await actor.submit(submission(lease))).verdicts[0].verdict)
                    if len(done) == 20:
                        halfway.set()

        with process(run_settings, redis_url) as first:
            working = asyncio.create_task(work())
            await halfway.wait()
            first.send_signal(signal.SIGKILL)
            assert first.wait() == -signal.SIGKILL
        at_kill = len(done)
        with process(run_settings, redis_url) as second:
            await working
            second.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(second.wait, 30) == 0

        assert at_kill < 40 * GROUP
        assert set(done) <= {Verdict.OK, Verdict.DUP}
        claim = await store.run(operations.claim(1, 1, 40))
        assert claim.complete
        await here.close()

    asyncio.run(asyncio.wait_for(story(), 120))


def test_what_a_person_must_change_ends_with_exit_code_2(
    redis_url: str, run_settings: Settings
) -> None:
    log = run_settings.run.folder / "broker.log"
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", int(run_settings.broker.endpoint.rpartition(":")[2])))
        holder.listen()
        with process(run_settings, redis_url) as broker:
            assert broker.wait(60) == 2
    assert "Address already in use; give an address of this machine" in log.read_text()

    (run_settings.run.folder / "keys" / "broker.key").unlink()
    with process(run_settings, redis_url) as broker:
        assert broker.wait(60) == 2
    assert "make keys with `nyala keys" in log.read_text()


def test_calls_wait_while_the_store_is_away(tmp_path: Path, keys: Path) -> None:
    port = free_port()
    log = (tmp_path / "redis.log").open("wb")

    @contextmanager
    def store_server() -> Iterator[None]:
        command = [find_redis_server(), "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
        server = subprocess.Popen(command, stdout=log, cwd=tmp_path)
        try:
            yield
        finally:
            server.kill()
            server.wait()

    async def story() -> None:
        async with ring(f"redis://127.0.0.1:{port}/0", keys) as here:
            actor = here.client("actor-1")
            greeting = asyncio.create_task(actor.hello(hello("actor-1")))
            assert await still_waits(greeting, 0.3)

            with store_server():

                async def begin_run() -> bool:
                    await begin(here.store, groups=1)
                    return True

                await until(begin_run, ignoring=StoreError)
                assert (await greeting).run_id == RUN
                lease, _ = (await actor.lease(LeaseRequest(2, FIRST))).leases
            submitting = asyncio.create_task(actor.submit(submission(lease)))
            assert await still_waits(submitting, 0.3)

            with store_server():  # without its files: it knows nothing any more
                assert (await submitting).verdicts[0].verdict is Verdict.GONE

    with log:
        asyncio.run(asyncio.wait_for(story(), 60))
