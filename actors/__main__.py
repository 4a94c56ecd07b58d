"""Commands of an actor's process: sample or score for a run, or export demonstrations.

`python -m actors --config runs/x/config.yaml` samples for one run until it ends, or SIGTERM; with
`--teacher NAME` it scores finished episodes instead;
`python -m actors export --config ... --out FOLDER` writes demonstrations for supervised training.
`nyala up` starts both; on other machines a person or a scheduler starts the first.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path

import structlog
import uvloop

from broker.transport.keys import load_public
from configs.durable import private_files
from configs.errors import NyalaError, exit_code
from configs.loader import load
from configs.logging import configure_logging
from configs.machine import raise_open_files
from configs.settings import Settings
from configs.tracing import tracing

from .assembly import new_incarnation, run_actor, run_teacher
from .demonstrations import export
from .preemption import source_of, stop_at_notice

log = structlog.get_logger()


@private_files()
def main(arguments: list[str] | None = None) -> int:
    """Run an actor or a teacher, or an export where the first argument is `export`.

    Raises the limit on open files of this process, and makes its new files private.

    Args:
        arguments: Arguments of the command; None = those of this process.

    Returns:
        0 at the end of the run or of an export, `actors.exit_when_told` for an actor that a signal
        or a preemption notice told to go, else `exit_code` of the error.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    raise_open_files()
    if arguments[:1] == ["export"]:
        return _export(arguments[1:])
    parser = _parser("python -m actors")
    parser.add_argument(
        "--name", default="actor", help="name of the actor in log lines and records"
    )
    parser.add_argument(
        "--key", help="name of its key; by default `actor`, or it registers one with `enrolment`"
    )
    parser.add_argument(
        "--teacher", metavar="NAME", help="score finished episodes as this teacher, and make none"
    )
    chosen = parser.parse_args(arguments)
    configure_logging("actor")
    try:
        settings = load(chosen.config, chosen.set)
        return _work_for_run(settings, chosen.name, chosen.key, chosen.teacher)
    except NyalaError as error:
        log.error(str(error), error=type(error).__name__)
        return exit_code(error)


def _work_for_run(settings: Settings, name: str, key: str | None, teacher: str | None) -> int:
    incarnation = new_incarnation(name)
    configure_logging("actor", run=settings.run.name, incarnation=incarnation)
    keys = settings.keys_folder
    with (
        tracing(settings.run, "actor", name=incarnation, salt=lambda: load_public(keys, "broker")),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        is_told = runner.run(_run_until_stopped(settings, incarnation, key, teacher))
    log.info("stopped", told=is_told)
    return settings.actors.exit_when_told if is_told else 0


async def _run_until_stopped(
    settings: Settings, incarnation: str, key: str | None, teacher: str | None
) -> bool:
    """Run until the end; return whether this machine, not the run, ended it."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with stop_at_notice(source_of(settings.actors.preemption), stop):
        if teacher is None:
            await run_actor(settings, incarnation, stop, key=key)
        else:
            await run_teacher(settings, incarnation, stop, name=teacher, key=key)
    return stop.is_set()


def _export(arguments: list[str]) -> int:
    parser = _parser("python -m actors export")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--data", help="dataset whose rows are written, instead of items")
    parser.add_argument("--count", type=int, default=0, help="items of run.environment to write")
    parser.add_argument("--held-out", type=int, default=0, help="rows or items to set aside")
    parser.add_argument("--seed", type=int, default=1, help="which items; RL begins with 0")
    parser.add_argument("--init", action="store_true", help="make the tokenizer of `init`, too")
    chosen = parser.parse_args(arguments)
    configure_logging("actor")
    try:
        counts = export(
            load(chosen.config, chosen.set),
            chosen.out,
            data=chosen.data,
            count=chosen.count,
            held_out=chosen.held_out,
            seed=chosen.seed,
            makes_tokenizer=chosen.init,
        )
    except NyalaError as error:
        log.error(str(error), error=type(error).__name__)
        return exit_code(error)
    sys.stdout.write(json.dumps(asdict(counts)) + "\n")
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
