"""The broker as a process: killed and restarted, stopped cleanly, refused with exit code 2."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from broker.keys import make_keys
from broker.messages import LeaseRequest, Verdict
from buffer.store import AsyncStore
from configs.loader import save
from configs.settings import Settings
from tests.broker.ring import FIRST, GROUP, RUN, Ring, begin, hello, settings_with
from tests.broker.test_life import submission


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def run_settings(tmp_path: Path) -> Settings:
    """A run folder with keys and a resolved config."""
    plain = settings_with(endpoint=f"tcp://127.0.0.1:{free_port()}")
    settings = plain.model_copy(
        update={"run": plain.run.model_copy(update={"directory": tmp_path})}
    )
    make_keys(settings.run.folder / "keys")
    save(settings, settings.run.folder / "config.yaml")
    return settings


class Process:
    """`python -m broker` with its log in a file."""

    def __init__(self, settings: Settings, redis_url: str) -> None:
        folder = settings.run.folder
        self.log = folder / "broker.log"
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "broker", "--config", str(folder / "config.yaml")],
                stderr=log,
                env={**os.environ, "NYALA_REDIS_URL": redis_url, "PYTHONPATH": str(Path.cwd())},
            )

    def wait_until_listening(self) -> None:
        deadline = time.monotonic() + 15
        while '"stage": "listening"' not in self.log.read_text():
            assert self._process.poll() is None and time.monotonic() < deadline, (
                self.log.read_text()
            )
            time.sleep(0.05)

    def end(self, number: signal.Signals) -> int:
        self._process.send_signal(number)
        return self._process.wait(10)

    def wait(self) -> int:
        return self._process.wait(15)


def test_actors_continue_when_the_broker_is_killed_and_restarted(
    redis_url: str, run_settings: Settings
) -> None:
    async def story() -> None:
        store = AsyncStore(redis_url, RUN)
        await begin(store, groups=40)
        broker = Process(run_settings, redis_url)
        endpoint = run_settings.broker.endpoint
        here = Ring(store, endpoint, run_settings.run.folder / "keys")
        actor = here.client("actor-1")
        await actor.hello(hello("actor-1"))
        done: list[Verdict] = []
        halfway = asyncio.Event()

        async def work() -> None:
            while len(done) < 40 * GROUP:
                for lease in (await actor.lease(LeaseRequest(4, FIRST))).leases:
                    verdicts = (await actor.submit(submission(lease))).verdicts
                    done.append(verdicts[0].verdict)
                    if len(done) == 20:
                        halfway.set()

        working = asyncio.create_task(work())
        await halfway.wait()
        assert broker.end(signal.SIGKILL) == -signal.SIGKILL
        at_kill = len(done)
        broker = Process(run_settings, redis_url)
        await asyncio.wait_for(working, 20)

        assert at_kill < 40 * GROUP
        assert set(done) <= {Verdict.OK, Verdict.DUP}
        await here.close()
        assert await asyncio.to_thread(broker.end, signal.SIGTERM) == 0

    asyncio.run(story())


def test_a_port_in_use_is_an_error_for_a_person(redis_url: str, run_settings: Settings) -> None:
    first = Process(run_settings, redis_url)
    first.wait_until_listening()

    second = Process(run_settings, redis_url)

    assert second.wait() == 2
    assert "listen on another port" in second.log.read_text()
    assert first.end(signal.SIGTERM) == 0


def test_missing_keys_are_an_error_for_a_person(redis_url: str, run_settings: Settings) -> None:
    (run_settings.run.folder / "keys" / "broker.key").unlink()

    broker = Process(run_settings, redis_url)

    assert broker.wait() == 2
    assert "make keys with `nyala keys" in broker.log.read_text()


def test_the_store_may_be_away_for_a_while(redis_url: str, run_settings: Settings) -> None:
    """Redis comes up after the broker: HELLO is answered late, not refused."""

    async def story() -> None:
        broker = Process(run_settings, "redis://127.0.0.1:1/0")
        broker.wait_until_listening()
        store = AsyncStore(redis_url, RUN)
        here = Ring(store, run_settings.broker.endpoint, run_settings.run.folder / "keys")
        actor = here.client("actor-1")
        waiting = asyncio.create_task(actor.hello(hello("actor-1"), deadline_s=20))
        await asyncio.sleep(0.7)
        assert not waiting.done()
        assert "the store does not answer" in broker.log.read_text()

        assert await asyncio.to_thread(broker.end, signal.SIGTERM) == 0
        await begin(store, groups=1)
        broker = Process(run_settings, redis_url)
        assert (await waiting).run_id == RUN
        await here.close()
        assert await asyncio.to_thread(broker.end, signal.SIGTERM) == 0

    asyncio.run(story())
