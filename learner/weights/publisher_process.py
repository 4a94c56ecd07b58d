"""The weight publisher process, the sidecar of learner rank 0.

Consumes sealed slots (`slots.py`), woken by a byte on stdin; serves actors on a ROUTER with CURVE.
Anything that could hang is here and not in the learner, so killing this process *is* the abort of a
broadcast. It ends when stdin does, or when rank 0 dies.
Writes JSON lines to stdout: `listening` once, `alive` every second, `sent` for each version.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import json
import os
import shutil
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from broker.transport.allow_list import AllowList, Role
from broker.transport.keys import load_pair
from broker.transport.sockets import bound_endpoint
from broker.weights.object_store import WeightStore
from broker.weights.port import host_and_port, open_router, reachable
from buffer.record.episode import PolicyVersion
from configs.logging import configure_logging

from .broadcast import BroadcastSettings
from .server import Sent, WeightServer
from .slots import Slots
from .sparse_chain import SparseChain

ALIVE_EVERY_S = 1.0
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class PublisherSettings:
    """The command line of the process."""

    run: str
    slots: Path
    keys: Path
    endpoint: str
    broadcast: bool
    join_s: float
    send_s: float
    use_cuda: bool
    sparse: bool
    store: str | None = None
    """URL of the object store."""

    def arguments(self) -> list[str]:
        """Return the command line that `parse` reads."""
        return [
            f"--run={self.run}",
            f"--slots={self.slots}",
            f"--keys={self.keys}",
            f"--endpoint={self.endpoint}",
            f"--join-s={self.join_s}",
            f"--send-s={self.send_s}",
            *["--broadcast"] * self.broadcast,
            *["--use-cuda"] * self.use_cuda,
            *["--sparse"] * self.sparse,
            *([] if self.store is None else [f"--store={self.store}"]),
        ]


def parse(arguments: list[str]) -> PublisherSettings:
    """Read what `PublisherSettings.arguments` wrote."""
    parser = argparse.ArgumentParser(prog="learner.weights.publisher_process", allow_abbrev=False)
    for name, kind in (("run", str), ("slots", Path), ("keys", Path), ("endpoint", str)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    for name in ("join-s", "send-s"):
        parser.add_argument(f"--{name}", type=float, required=True)
    for name in ("broadcast", "use-cuda", "sparse"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--store")
    return PublisherSettings(**vars(parser.parse_args(arguments)))


def main() -> None:
    """Serve until stdin ends."""
    settings = parse(sys.argv[1:])
    parent = os.getppid()
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; rank 0 decides
    configure_logging("publisher", run=settings.run)
    os.set_blocking(sys.stdout.fileno(), False)  # a learner that does not read must not stop us
    context = zmq.asyncio.Context()
    keys = load_pair(settings.keys, "learner")
    door = open_router(context, settings.endpoint, folder=settings.keys, keys=keys)
    with door as (router, allowed):
        try:
            asyncio.run(_serve(settings, router, allowed))
        finally:
            if os.getppid() != parent:  # the learner was killed: nobody else cleans up
                shutil.rmtree(settings.slots, ignore_errors=True)


async def _serve(
    settings: PublisherSettings, router: zmq.asyncio.Socket, allowed: AllowList
) -> None:
    endpoint = reachable(bound_endpoint(router))
    host, _ = host_and_port(endpoint)
    groups = BroadcastSettings(host, settings.join_s, settings.send_s, settings.use_cuda)
    server = WeightServer(
        router,
        Slots(settings.slots),
        run=settings.run,
        broadcast=groups if settings.broadcast else None,
        store=WeightStore(settings.store, settings.run) if settings.store is not None else None,
        chain=SparseChain() if settings.sparse else None,
        report=_report,
        allows=lambda key: allowed.role(key.encode()) is Role.ACTOR,
    )
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(sys.stdin.fileno(), _read_stdin, server, ended)
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    _say({"event": "listening", "endpoint": endpoint})
    async with asyncio.TaskGroup() as tasks:
        working = [tasks.create_task(server.serve()), tasks.create_task(_say_alive(allowed))]
        await ended.wait()
        for task in working:
            task.cancel()


def _read_stdin(server: WeightServer, ended: asyncio.Event) -> None:
    if os.read(sys.stdin.fileno(), 4096):
        server.wake()
    else:
        ended.set()


async def _say_alive(allowed: AllowList) -> None:
    while True:
        _say({"event": "alive"})
        allowed.refresh()  # a key may be taken off the list while its holder is connected
        await asyncio.sleep(ALIVE_EVERY_S)


def as_sent(line: dict[str, Any]) -> Sent:
    """Read a `sent` line, without its `event`."""
    return Sent(version=PolicyVersion(*line.pop("version")), **line)


def _report(sent: Sent) -> None:
    _say({"event": "sent", **asdict(sent)})


def _say(line: dict[str, object]) -> None:
    with contextlib.suppress(BlockingIOError):  # one line less; `alive` comes again
        os.write(sys.stdout.fileno(), json.dumps(line).encode() + b"\n")


def _die_with_parent() -> None:
    """Ask for SIGTERM when rank 0 dies (Linux); elsewhere the end of stdin has to do."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    main()
