"""Commands of an actor's process: sample for a run, or export demonstrations.

`python -m actors --config runs/x/config.yaml` samples for one run until it ends, or SIGTERM;
`python -m actors export --config ... --out FILE --count N` writes demonstrations for a supervised
start. `nyala up` starts both; on other machines a person or a scheduler starts the first.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import structlog
import uvloop

from actors.environments.agent import AgentTask
from actors.environments.calls import call, drive, finish, needs_loop
from actors.environments.registry import call_within, make_environment
from broker.transport.keys import load_public
from configs import durable
from configs.durable import private_files
from configs.errors import NyalaError, SettingsError, exit_code
from configs.loader import load
from configs.logging import configure_logging
from configs.machine import raise_open_files
from configs.settings import RunSettings, Settings
from configs.tracing import tracing

from .assembly import new_incarnation, run_actor
from .chat import read_prompt, text_of
from .preemption import source_of, stop_at_notice

# --------------------------------------------------------------------------------------------------
# Export of training items with their right answers, for a supervised start.
#
# One JSON object a line: `{"prompt": str, "answer": str | null, "segments": [[text, trained],
# ...]}`. Segments follow the prompt in order: the policy's turns (`trained`, each to be followed
# by the end-of-turn token) and the observations between them. For live agents, whose model has a
# chat template, a line is a chat: `{"messages": [...], "tools": [...]}`. Held-out items are never
# written.

TIMEOUT_S = 600.0  # a hundred thousand items take seconds; a generator may be slow, not endless


def export(
    run: RunSettings, out: Path, *, count: int, seed: int, needs_answers: bool = True
) -> int:
    """Write `count` demonstrations to `out`; return how many lines were written.

    `out` is written under another name first, so it is complete once it exists.

    Args:
        run: Settings of the run, which name the environment.
        out: JSON lines to write; an existing file is replaced.
        count: Items to write.
        seed: Block of `count` training items to write; RL begins at item 0, in block 0.
        needs_answers: Refuse an item without a demonstration. False = write such items too, for a
            model that needs only the characters of the texts.

    Raises:
        SettingsError: The environment cannot be made, or an item has no demonstration although
            `needs_answers` is set.
        DeadlineError: The export takes longer than 600 s.
    """

    def write() -> int:
        out.parent.mkdir(parents=True, exist_ok=True)
        unfinished = out.with_name(f".{out.name}.{os.getpid()}")
        with (
            durable.removed_if_unwritten(unfinished),
            unfinished.open("w", encoding="utf-8") as file,
        ):
            num_lines = sum(
                file.write(line) > 0
                for line in _demonstration_lines(run, count, seed, needs_answers)
            )
        unfinished.replace(out)
        return num_lines

    return call_within(TIMEOUT_S, write, what="export of run.environment")


def _demonstration_lines(
    run: RunSettings, count: int, seed: int, needs_answers: bool
) -> Iterator[str]:
    mixture, alone = run.mixture, run.by_environment
    environments = [make_environment(settings) for settings in alone.values()]
    for number in range(seed * count, (seed + 1) * count):
        place = mixture.training(number)
        environment = environments[place.environment]
        begin = environment.begin
        work = call(begin, place.item, seed, held_out=False, limit_s=TIMEOUT_S)
        conversation = finish(work) if needs_loop(environment, begin) else drive(work)
        segments = conversation.demonstration
        chat = None
        if isinstance(conversation, AgentTask):
            chat = conversation.demonstrated_chat()
        if needs_answers and not (segments or chat):
            raise SettingsError(
                f"run.environment must give demonstrations for a supervised start, got none from "
                f"{list(alone)[place.environment]} for item {place.item}; add them there, for live "
                "agents by environment_settings.demonstration, or set learner.warm_start_steps to 0"
            )
        prompt = text_of(read_prompt(conversation.prompt))
        fields: dict[str, Any] = {
            "prompt": prompt,
            "answer": conversation.answer,
            "segments": [list(segment) for segment in segments],
        }
        if isinstance(conversation, AgentTask):
            fields = chat or {"messages": [{"role": "user", "content": prompt}], "tools": []}
        yield json.dumps(fields, ensure_ascii=False) + "\n"


# --------------------------------------------------------------------------------------------------
# Commands of an actor's process.

log = structlog.get_logger()


@private_files()
def main(arguments: list[str] | None = None) -> int:
    """Run an actor, or an export where the first argument is `export`.

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
    chosen = parser.parse_args(arguments)
    configure_logging("actor")
    try:
        settings = load(chosen.config, chosen.set)
        return _sample_for_run(settings, chosen.name, chosen.key)
    except NyalaError as error:
        log.error(str(error), error=type(error).__name__)
        return exit_code(error)


def _sample_for_run(settings: Settings, name: str, key: str | None) -> int:
    incarnation = new_incarnation(name)
    configure_logging("actor", run=settings.run.name, incarnation=incarnation)
    keys = settings.keys_folder
    with (
        tracing(settings.run, "actor", name=incarnation, salt=lambda: load_public(keys, "broker")),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        is_told = runner.run(_run_until_stopped(settings, incarnation, key))
    log.info("stopped", told=is_told)
    return settings.actors.exit_when_told if is_told else 0


async def _run_until_stopped(settings: Settings, incarnation: str, key: str | None) -> bool:
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
