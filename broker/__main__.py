"""`python -m broker --config runs/x/config.yaml`: serve one run until SIGTERM."""

from __future__ import annotations

import argparse
import asyncio
import gc
import signal
import sys
from pathlib import Path

import structlog
import uvloop

from broker.server.server import Broker
from broker.transport.keys import load_public
from buffer.store import AsyncStore
from configs.durable import private_files
from configs.errors import NyalaError, exit_code
from configs.loader import load
from configs.logging import configure_logging
from configs.machine import raise_open_files
from configs.secrets import redis_url
from configs.settings import Settings
from configs.tracing import tracing

from .metrics_page import BrokerPage

log = structlog.get_logger()


@private_files()
def main(arguments: list[str] | None = None) -> int:
    """Run the broker until SIGTERM or SIGINT.

    Raises the limit of open files to the most that the system allows.

    Returns:
        0 after a clean stop, else the `exit_code` of the error, which is logged.
    """
    parser = argparse.ArgumentParser(prog="python -m broker", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="the run's config.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="table.key=value")
    chosen = parser.parse_args(arguments)
    raise_open_files()
    configure_logging("broker")
    try:
        settings = load(chosen.config, chosen.set)
        configure_logging("broker", run=settings.run.name)
        gc.freeze()  # imported modules stay: no collection has to visit them again
        keys = settings.keys_folder
        with (
            tracing(settings.run, "broker", salt=lambda: load_public(keys, "broker")),
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            runner.run(_serve(settings))
    except NyalaError as error:
        log.error(str(error), error=type(error).__name__)
        return exit_code(error)
    log.info("stopped")
    return 0


async def _serve(settings: Settings) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    store = AsyncStore(redis_url(settings.run, settings.buffer), run=settings.run.name)
    try:
        keys = settings.keys_folder
        audit_file = settings.run.folder / "logs" / "audit.jsonl"
        broker = Broker(settings, store, keys=keys, audit_file=audit_file)
        async with BrokerPage(broker.parts, store, settings).serving():
            await broker.serve(stop)
    finally:
        await store.close()


if __name__ == "__main__":
    sys.exit(main())
