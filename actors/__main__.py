"""Commands of an actor's process.

`python -m actors --config runs/x/config.yaml` samples for one run until it ends, or SIGTERM;
`python -m actors export --config ... --out FILE --count N` writes demonstrations for a supervised
start.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from pathlib import Path

import structlog
import uvloop

from broker.transport.keys import load_public
from configs.errors import NyalaError, exit_code
from configs.loader import load
from configs.logging import configure_logging
from configs.settings import Settings
from configs.tracing.tracing import tracing

from .assembly import new_incarnation, run_actor
from .export import export
from .preemption import source_of, stop_at_notice

log = structlog.get_logger()


def main(arguments: list[str] | None = None) -> int:
    """Run an actor or an export.

    Returns:
        0 at the end of the run, `actors.exit_when_told` for an actor that was told to go, else
        `exit_code` of the error.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["export"]:
        return _export(arguments[1:])
    parser = _parser("python -m actors")
    parser.add_argument(
        "--name", default="actor", help="name of the actor in log lines and records"
    )
    parser.add_argument(
        "--key", help="name of its key; by default `actor`, or it registers one with `enrolment`"
    )
    chosen = parser.parse_args(arguments)
    configure_logging("actor")
    try:
        settings = load(chosen.config, chosen.set)
        return _act(settings, chosen.name, chosen.key)
    except NyalaError as error:
        log.error(str(error), error=type(error).__name__)
        return exit_code(error)


def _act(settings: Settings, name: str, key: str | None) -> int:
    incarnation = new_incarnation(name)
    configure_logging("actor", run=settings.run.name, incarnation=incarnation)
    keys = settings.broker.keys or settings.run.folder / "keys"
    with (
        tracing(settings.run, "actor", name=incarnation, salt=lambda: load_public(keys, "broker")),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        is_told = runner.run(_until_stopped(settings, incarnation, key))
    log.info("stopped", told=is_told)
    return settings.actors.exit_when_told if is_told else 0


async def _until_stopped(settings: Settings, incarnation: str, key: str | None) -> bool:
    """Run until the end; return whether this machine, not the run, ended it."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with stop_at_notice(source_of(settings.actors.preemption), stop):
        await run_actor(settings, incarnation, stop, key=key)
    return stop.is_set()


def _export(arguments: list[str]) -> int:
    parser = _parser("python -m actors export")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines to write")
    parser.add_argument("--count", type=int, required=True, help="items to write")
    parser.add_argument("--seed", type=int, default=1, help="which items; RL begins with 0")
    chosen = parser.parse_args(arguments)
    configure_logging("actor")
    try:
        settings = load(chosen.config, chosen.set)
        written = export(
            settings.run,
            chosen.out,
            count=chosen.count,
            seed=chosen.seed,
            needs_answers=settings.learner.warm_start_steps > 0,
        )
    except NyalaError as error:
        log.error(str(error), error=type(error).__name__)
        return exit_code(error)
    log.info("exported", items=written, out=str(chosen.out))
    return 0


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=program, description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="the run's config.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="table.key=value")
    return parser


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # A thread of gloo that still waits for a dead peer aborts an interpreter that ends normally.
    os._exit(code)
