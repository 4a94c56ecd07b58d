"""Fixtures that several roles share: a real Redis server, and a process group of one."""

from __future__ import annotations

import gc
import os
import secrets
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
import redis
import structlog

from console.run.redis_server import find_binary
from tests.needs import LeftOut
from tests.waiting import wait_until

if TYPE_CHECKING:
    from learner.model.ranks import Ranks

# Cores are shared with other processes: how long one example takes says nothing.
hypothesis.settings.register_profile(
    "shared cores", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("shared cores")


# As `configs.logging` does: drawing the variables of a thread that died takes seconds.
structlog.configure(
    processors=[
        structlog.stdlib.add_log_level,
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback),
    ]
)


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """Log as before again after a test that has called a role's `main`."""
    before = structlog.get_config()
    yield
    if structlog.get_config() != before:
        structlog.configure(**before)


# A card is no matter to tests of a torch for CPUs; learners would refuse to leave it out.
if version("torch").endswith("+cpu"):
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")


# A shell starts what runs in the background with SIGINT ignored, and children would ignore it, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


class FailuresAtOnce:
    """Names each failure when it happens: a run that ends at its deadline lists none at its end."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write its name, and the phase that failed."""
        if report.failed:
            self._config.get_terminal_writer().line(f"\nfailed in {report.when}: {report.nodeid}")


def pytest_configure(config: pytest.Config) -> None:
    """Where tests run in several processes, only the one that collects their reports writes."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(FailuresAtOnce(config))
        config.pluginmanager.register(LeftOut())


# What importing makes stays: looking for garbage in it takes a fifth of the time.
gc.disable()


def pytest_collection_finish() -> None:
    """Look for garbage again, but never among what was imported."""
    gc.freeze()
    gc.enable()


def find_redis_server() -> str:
    """The server that `nyala up` starts, or the one that NYALA_TEST_SERVER names."""
    return os.environ.get("NYALA_TEST_SERVER") or str(find_binary())


@pytest.fixture(scope="session")
def redis_server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The server of this test session."""
    with running_redis(tmp_path_factory.mktemp("redis")) as url:
        yield url


@contextmanager
def running_redis(folder: Path) -> Iterator[str]:
    """Run a server with a password, on a free loopback port; gives its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    password = secrets.token_hex(16)
    settings = folder / "redis.conf"
    settings.write_text(
        f'bind 127.0.0.1\nport {port}\nrequirepass {password}\ndir "{folder}"\n'
        'save ""\nappendonly no\nmaxmemory 512mb\nmaxmemory-policy noeviction\n'
    )
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen([find_redis_server(), str(settings)], stdout=log, stderr=log)
    url = f"redis://:{password}@127.0.0.1:{port}/0"
    try:
        _wait_until_up(url)
        yield url
    finally:
        server.terminate()
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


@pytest.fixture
def redis_url(redis_server_url: str) -> str:
    """URL of an empty database of the session's server."""
    with redis.Redis.from_url(redis_server_url) as client:
        client.flushall()
    return redis_server_url


def _wait_until_up(url: str) -> None:
    with redis.Redis.from_url(url) as client:
        wait_until(client.ping, "Redis does not start", ignoring=redis.ConnectionError)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """The only rank of a process group on the CPU; a process has one such group in its life."""
    from torch import distributed

    from learner.model.ranks import join

    alone = join("cpu", threads=1)
    yield alone
    if distributed.is_initialized():  # an engine that closes in this process ends its groups too
        alone.destroy_process_group()
