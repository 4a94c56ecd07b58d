"""`nyala up`: a whole run on this machine.

This module does the first part: settings, files of an earlier session, checks. Nothing is written
before the checks have passed. `session.py` does the rest.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from buffer.admin import forget_run
from buffer.client.address import without_password
from configs.errors import SettingsError
from configs.loader import load
from configs.machine import memory_of_machine
from configs.settings import Settings
from configs.weight_path import describe_weight_path
from console.command_line import Config, ConfigOption, Overrides, TrustCheckpoint, one_of, program
from console.display.display import print_line
from console.display.result import print_result
from console.report.record import changed_settings
from console.run.card_memory import GIB, smallest_card, table_of_sizes
from console.run.checks.model import learner_memory, machine_memory
from console.run.fork_server import ForkServer, fork_server_of
from console.run.init_model import reuse
from console.run.plan import awaited_agents, commands, given_redis
from console.run.preflight import check_room, check_start
from console.run.run_folder import RunFolder, RunState, refuse_changes, settings_of
from console.run.user_files import resolve, resolve_as_begun, with_value
from learner.algorithm.methods import overrides_of

from .session import Session

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def up(  # noqa: PLR0917 - typer calls it by name
    config: Config = None,
    config_option: ConfigOption = None,
    overrides: Overrides = None,
    method: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Train by a published method, such as GSPO; `nyala losses` lists them. Its "
            "settings go over those of the file, and --set over both.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Check everything, start nothing, show what would be started."
        ),
    ] = False,
    card_gib: Annotated[
        float | None,
        typer.Option(
            "--card-gib",
            metavar="GIB",
            help="Refuse what does not fit a GPU of this size. Default: the smallest of this "
            "machine.",
            show_default=False,
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Archive an earlier run of this name and begin anew.")
    ] = False,
    trust_checkpoint: TrustCheckpoint = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Print lines instead of a live display.")
    ] = False,
) -> None:
    """Start a whole run on this machine.

    Starts Redis, broker, learner, actors and live agents, restarts what dies, and stops cleanly
    with Ctrl-C. The same command again goes on from the newest checkpoint; a run that has finished
    is reported.

    Example: `nyala up configs/demo.yaml --method GSPO --set actors.count=3`
    """
    launch = Launch(
        one_of(config, config_option),
        overrides or [],
        method=method,
        fresh=fresh,
        trust_checkpoint=trust_checkpoint,
        dry_run=dry_run,
        card_gib=card_gib,
        plain=plain,
    )
    raise typer.Exit(start(launch, Console()))


@dataclass(frozen=True, slots=True)
class Launch:
    """The options of one `nyala up`."""

    config: Path
    overrides: Sequence[str] = ()
    method: str | None = None
    fresh: bool = False
    trust_checkpoint: str | None = None
    dry_run: bool = False
    card_gib: float | None = None
    plain: bool = False

    @property
    def changes(self) -> list[str]:
        """All changes to the settings of the file, in the order in which they apply."""
        return [*(overrides_of(self.method) if self.method else []), *self.overrides]

    @property
    def command(self) -> str:
        """Command that resumes the run: as typed, without `--fresh` and `--trust-checkpoint`."""
        flags = [text for override in self.overrides for text in ("--set", override)]
        flags += ["--method", self.method] if self.method else []
        flags += ["--plain"] if self.plain else []
        return shlex.join([program(), "up", str(self.config), *flags])


def start(launch: Launch, console: Console) -> int:
    """Start or resume the run, stay with it to its end, and return the exit code.

    A run that has finished is reported, and one with `dry_run` is only described: exit code 0.

    Raises:
        NyalaError: The run cannot be started.
    """
    if launch.fresh and launch.trust_checkpoint is not None:
        raise SettingsError(
            "--trust-checkpoint must be given without --fresh, which begins without a checkpoint, "
            "got both; leave one of the two out"
        )
    typed = settings_of(launch.config, launch.changes)
    settings = resolve(typed)
    folder = RunFolder(settings.run.folder)
    with folder.locked(), ExitStack() as stack:
        has_begun = not launch.fresh and folder.state is not RunState.NEW
        if has_begun:
            _refuse_supervised(folder)
            settings = resolve_as_begun(typed, load(folder.config))
            refuse_changes(folder, settings)
        if has_begun and folder.state is RunState.FINISHED:
            console.print(
                f"{settings.run.name} has finished; --fresh begins it anew", soft_wrap=True
            )
            print_result(console, folder)
            return 0
        redis_url = given_redis(settings.buffer, folder)
        forks = None if launch.dry_run else _begin_imports(console, settings, stack)
        if launch.card_gib is not None:  # of another machine: checked before this machine is
            say_card_memory(console, settings, launch.card_gib)
        _warn(
            console,
            check_start(settings, redis_url=redis_url, forks=forks, has_begun=has_begun),
        )
        if launch.card_gib is None:
            _check_room(console, settings, is_said=launch.dry_run)
        if launch.dry_run:
            _print_plan(console, settings, folder)
            return 0
        if launch.fresh:
            _begin_anew(console, settings, folder, redis_url)
        if launch.trust_checkpoint is not None:
            _trust(console, settings, launch.trust_checkpoint)
        if has_begun:
            start = folder.newest_checkpoint() or "the start: there is no checkpoint yet"
            console.print(f"{settings.run.name} goes on from {start}", highlight=False)
        say_weight_path(console, settings)
        return Session(
            settings,
            folder,
            console,
            redis_url=redis_url,
            resume_command=launch.command,
            plain=launch.plain,
            forks=forks,
        ).run()


def _refuse_supervised(folder: RunFolder) -> None:
    """Refuse the name of supervised training, which has no episodes to go on with."""
    if folder.demonstrations.exists():
        raise SettingsError(
            f"run.name must be of another run than supervised training, got {folder.path}, a run "
            f"of `nyala sft`; go on with `nyala sft`, or train its model by reward: --set "
            f"run.name=NEW --set run.model={folder.model}"
        )


def _begin_imports(console: Console, settings: Settings, stack: ExitStack) -> ForkServer | None:
    """Have a server import libraries while this process checks, and print what is waited for."""
    console.print("checking settings, model, data and this machine", soft_wrap=True)
    return stack.enter_context(fork_server_of(settings))


def say_weight_path(console: Console, settings: Settings) -> None:
    """Print how weights leave this machine: process groups are open to all who can reach them."""
    path = describe_weight_path(settings.run, settings.learner)
    console.print(f"weights to other machines: {path}", highlight=False, soft_wrap=True)


def _warn(console: Console, doubts: Sequence[str]) -> None:
    """Print what is doubtful and does not prevent the run."""
    for doubt in doubts:
        console.print(f"warning: {doubt}", highlight=False, markup=False, soft_wrap=True)


def _check_room(console: Console, settings: Settings, *, is_said: bool) -> None:
    """Refuse a run that does not fit this machine; print what it takes if `is_said`."""
    _warn(console, check_room(settings))
    if is_said:
        say_card_memory(console, settings, None)


def say_card_memory(console: Console, settings: Settings, card_gib: float | None) -> None:
    """Print the memory of the learner, and the memory of the whole run on this machine.

    Args:
        console: Console to print on.
        settings: Settings of the run.
        card_gib: Size of a card of another machine; None = the smallest card of this one.

    Raises:
        SettingsError: The card is too small.
    """
    card_bytes = smallest_card() if card_gib is None else int(card_gib * GIB)
    result = learner_memory(settings, card_bytes)
    if isinstance(result, str):
        if settings.run.model != "init":
            console.print(f"memory of the learner: {result}", highlight=False)
        return
    memory, on_gpu = result
    lines = memory.lines()
    if card_gib is None:
        lines.append("memory of this machine for the whole run, computed:")
        parts = machine_memory(settings, memory)
        rows = {**parts, "together": sum(parts.values()), "there is": memory_of_machine()}
        lines += table_of_sizes(rows)
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    if on_gpu and card_bytes is not None:
        memory.check_fit(card_bytes)


def _trust(console: Console, settings: Settings, name: str) -> None:
    from learner.checkpointing.resume import trust_checkpoint  # noqa: PLC0415 - torch

    trust_checkpoint(settings.run, name)
    console.print(f"{name} is this run's own from now on", highlight=False)


def _begin_anew(
    console: Console, settings: Settings, folder: RunFolder, redis_url: str | None
) -> None:
    """Archive an earlier run, and remove it from a Redis server of the user."""
    if folder.path.exists():
        archived = folder.archive()
        console.print(f"the earlier run is now in {archived}", highlight=False, soft_wrap=True)
        reuse(settings, archived, folder)
    if redis_url is not None:
        forget_run(redis_url, settings.run.name)


def _print_plan(console: Console, settings: Settings, folder: RunFolder) -> None:
    """Print what would be started, and which settings differ from their defaults."""
    if settings.buffer.url is not None:
        settings = with_value(settings, "buffer", "url", without_password(settings.buffer.url))
    console.print(f"would start in {folder.path} ({folder.state}):", soft_wrap=True)
    for command in commands(settings, folder):
        gpus = command.environment.get("CUDA_VISIBLE_DEVICES")
        where = f"GPU {gpus}" if gpus else f"{command.environment['OMP_NUM_THREADS']} thread(s)"
        console.print(f"  {command.name}: {where}", highlight=False)
    if (awaited := awaited_agents(settings)) is not None:
        print_line(console, awaited)
    say_weight_path(console, settings)
    print_line(console, "settings that differ from their defaults; `nyala settings` lists all:")
    for path, (value, default) in changed_settings(settings).items():
        print_line(console, f"  {path}: {value}" + f" (default {default})" * (default != "-"))
