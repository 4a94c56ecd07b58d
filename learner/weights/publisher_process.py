"""The weight publisher process: sidecar of learner rank 0.

Consumes sealed slots (`memory.py`) and the addresses of brokers (`broker_list.py`), woken by a byte
on stdin; serves actors on a ROUTER with CURVE.
Anything that could hang is here and not in the learner, so killing this process *is* the abort of a
broadcast. It ends when stdin does, or when rank 0 dies.
Writes JSON lines to stdout: `listening` once, `alive` every second, `sent` for each version.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
from dataclasses import asdict
from pathlib import Path

import msgspec
import structlog
import uvloop
import zmq
import zmq.asyncio
from msgspec import Struct

from broker.transport.allow_list import Role
from broker.transport.keys import load_pair
from broker.transport.sockets import advertised, bound_endpoint, host_and_port, reachable
from broker.transport.zap import ZapAuthenticator
from broker.weights.port import open_router
from configs.child import die_with_parent
from configs.logging import configure_logging

from .broadcast import BroadcastSettings
from .broker_list import BrokerList
from .log import VersionDelivery
from .memory import WeightSlots
from .server import WeightServer
from .updates import SparseChain

ALIVE_EVERY_S = 1.0

log = structlog.get_logger()


class PublisherSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The one argument of the process, as JSON."""

    run: str
    slots: Path
    keys: Path
    endpoint: str
    advertise: str | None = None
    """Host, or host and port, under which actors reach it; None = its own."""
    broadcast: bool
    join_s: float
    send_s: float
    use_cuda: bool
    ports: tuple[int, int] | None = None
    """First and last port of the stores of groups; None = any free one."""
    sparse: bool

    def argument(self) -> str:
        """Return the text that `parse` reads."""
        return msgspec.json.encode(self, enc_hook=str).decode()


def parse(argument: str) -> PublisherSettings:
    """Read the text of `PublisherSettings.argument`.

    Raises:
        msgspec.ValidationError: A field is missing, unknown or of another type.
    """
    return msgspec.json.decode(
        argument, type=PublisherSettings, dec_hook=lambda kind, text: kind(text)
    )


def main() -> None:
    """Serve until stdin ends; where the learner was killed, remove its slots."""
    (argument,) = sys.argv[1:]
    settings = parse(argument)
    parent = os.getppid()
    die_with_parent(signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; rank 0 decides
    configure_logging("publisher", run=settings.run)
    os.set_blocking(sys.stdout.fileno(), False)  # never blocks on a learner that does not read
    context = zmq.asyncio.Context()
    keys = load_pair(settings.keys, "learner")
    door = open_router(context, settings.endpoint, allowed=settings.keys, keys=keys)
    with door as (router, authenticator):
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(_serve(settings, router, authenticator, parent))
        finally:
            if os.getppid() != parent:  # the learner was killed and cannot clean up
                shutil.rmtree(settings.slots, ignore_errors=True)


async def _serve(
    settings: PublisherSettings,
    router: zmq.asyncio.Socket,
    authenticator: ZapAuthenticator,
    parent: int,
) -> None:
    bound = bound_endpoint(router)
    named = settings.advertise  # its own address is then not needed, and may have no route
    endpoint = reachable(bound) if named is None else advertised(bound, named)
    server = WeightServer(
        router,
        WeightSlots(settings.slots),
        run=settings.run,
        broadcast=_groups(settings, bound) if settings.broadcast else None,
        chain=SparseChain() if settings.sparse else None,
        report=_report_sent,
        allows=lambda key: authenticator.allowed.role(key.encode()) is Role.ACTOR,
    )
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    brokers = BrokerList(settings.slots)
    server.introduce(brokers.read())
    loop.add_reader(sys.stdin.fileno(), _read_stdin, server, brokers, ended)

    def told() -> None:
        if os.getppid() != parent:  # else whoever tells all processes to end: the learner decides
            ended.set()

    loop.add_signal_handler(signal.SIGTERM, told)
    _write_line({"event": "listening", "endpoint": endpoint, "bound": bound})
    async with asyncio.TaskGroup() as tasks:
        working = [
            tasks.create_task(server.serve()),
            tasks.create_task(_report_alive(authenticator)),
        ]
        await ended.wait()
        for task in working:
            task.cancel()


def _groups(settings: PublisherSettings, bound: str) -> BroadcastSettings:
    """Return how groups meet: their stores listen where the publisher does."""
    host, _ = host_and_port(reachable(bound))
    return BroadcastSettings(
        host, settings.join_s, settings.send_s, settings.use_cuda, settings.ports
    )


def _read_stdin(server: WeightServer, brokers: BrokerList, ended: asyncio.Event) -> None:
    if os.read(sys.stdin.fileno(), 4096):
        server.wake()
        try:
            server.introduce(brokers.read())
        except OSError as error:  # no file may be opened just now; the next version comes soon
            log.warning("no more files can be opened at the moment", reason=str(error))
    else:
        ended.set()


async def _report_alive(authenticator: ZapAuthenticator) -> None:
    while True:
        _write_line({"event": "alive"})
        authenticator.refresh()
        await asyncio.sleep(ALIVE_EVERY_S)


def _report_sent(sent: VersionDelivery) -> None:
    _write_line({"event": "sent", **asdict(sent)})


def _write_line(line: dict[str, object]) -> None:
    with contextlib.suppress(BlockingIOError):  # one line less; `alive` comes again
        os.write(sys.stdout.fileno(), json.dumps(line).encode() + b"\n")


if __name__ == "__main__":
    main()
