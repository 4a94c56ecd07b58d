"""`nyala actor`, `agents`, `learner`, `broker`: one process of a run, or several actors kept up."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from broker.transport.keys import HOST, make_client
from broker.weights.shared_memory import scratch
from configs.errors import SettingsError
from configs.machine import visible_gpus
from configs.settings import Settings
from console.command_line import Config, ConfigOption, Overrides, TrustCheckpoint, one_of
from console.display.display import print_line
from console.display.progress import Stages
from console.run.plan import environment_of, keep_settings, metrics_flags, role_command
from console.run.process import Command, Process
from console.run.process_guard import ProcessGuard
from console.run.run_folder import RunFolder, settings_of
from console.run.supervisor import (
    SETTINGS_ERROR,
    SUPERVISE_EVERY_S,
    RestartPolicy,
    RunOutcome,
    StopSignals,
    Supervisor,
)

from .join_pack import is_pack, open_pack

# --------------------------------------------------------------------------------------------------
# Plan of several actors on one machine: their cards, names and commands.

ALL = "all"
LONGEST_HOST = 32


def cards_of_actors(
    size: int, *, count: int | None, gpus: str | None, visible: Sequence[str]
) -> list[tuple[str, ...]]:
    """Choose the cards of each actor; none for actors on the CPU.

    Args:
        size: `actors.tensor_parallel_size`.
        count: Actors; None = one for each card, or group of `size` cards.
        gpus: `all`, or cards with commas between them; None = all that there are.
        visible: Cards that we may use.

    Raises:
        SettingsError: There are no such cards, or too few.
    """
    if gpus is None and not visible:
        return [()] * (count or 1)
    cards = list(visible) if gpus in (None, ALL) else [card.strip() for card in gpus.split(",")]
    unknown = [card for card in cards if card not in visible]
    if unknown or not cards:
        raise SettingsError(
            f"--gpus must be cards that we may use here ({', '.join(visible) or 'none'}), got "
            f"{gpus}; see `nvidia-smi -L` and CUDA_VISIBLE_DEVICES, or leave --gpus out for "
            f"{'all of these' if visible else 'the CPU'}"
        )
    if len(set(cards)) < len(cards):
        raise SettingsError(f"--gpus must have each card once, got {gpus}; leave out the second")
    most = len(cards) // size
    wanted = most if count is None else count
    if not 0 < wanted <= most:
        raise SettingsError(
            f"--count must be at most {len(cards)} card(s) / actors.tensor_parallel_size {size} = "
            f"{most}, got {max(wanted, 1)}; lower it or actors.tensor_parallel_size, as each actor "
            f"has cards of its own"
        )
    return [tuple(cards[first : first + size]) for first in range(0, wanted * size, size)]


def actor_commands(
    alone: Command, settings: Settings, *, count: int | None, gpus: str | None
) -> list[Command]:
    """Return one command for each actor.

    Args:
        alone: Command of one actor by itself.
        settings: Settings of the run.
        count: Number of actors, as in `cards_of_actors`.
        gpus: Cards of the actors, as in `cards_of_actors`.

    Raises:
        SettingsError: There are fewer cards than the actors need.
    """
    size = settings.actors.tensor_parallel_size
    placed = cards_of_actors(size, count=count, gpus=gpus, visible=visible_gpus())
    return [_command(alone, settings, number, cards) for number, cards in enumerate(placed)]


def _command(alone: Command, settings: Settings, number: int, cards: tuple[str, ...]) -> Command:
    # The log lies in a folder that machines may share; two groups of one machine have other cards.
    # In a container the run's folder may be read-only.
    host = socket.gethostname().partition(".")[0][:LONGEST_HOST]
    name = f"{alone.name}-{host}-{'gpu' + '-'.join(cards) if cards else number}"
    return replace(
        alone,
        name=name,
        arguments=(*alone.arguments, "--name", name, *metrics_flags(settings, number)),
        log=RunFolder(scratch(settings.run.folder)).log(name),
        environment=environment_of("actor", settings, gpus=cards),
    )


# --------------------------------------------------------------------------------------------------
# Several actors of one machine: started together, restarted on failure, drained together.
#
#     start all ──▶ watch ──▶ all have drained: the run has ended           exit code 0
#                     │  └──▶ one cannot be kept up: the others drain       1, or 2 for settings
#                     └─────▶ Ctrl-C, SIGTERM, SIGHUP: all drain            `actors.exit_when_told`
#                               └──▶ once more: all end at once             130
#
# Waits for nothing but these. The processes are supervised as `nyala up` does it, without Redis:
# the leases of an actor that dies go to others when the broker has missed it for long enough.

FAILED = 1
STOPPED = 130  # what shells give to Ctrl-C
ENDING_S = 20.0
"""Beyond `actors.drain_s`: taking leave, and the end of engine and rewards (docs/fleet.md)."""


def run_group(commands: Sequence[Command], settings: Settings, say: Callable[[str], None]) -> int:
    """Start the actors, watch and restart them, and stay until all have ended.

    Returns:
        The exit code: 0 if the run has ended, `actors.exit_when_told` after an interrupt, 130 after
        a second one. If an actor cannot be kept up, 2 for wrong settings, else 1.
    """
    guard = ProcessGuard(grace_s=_grace_s(settings))
    processes = [Process(command, guard) for command in commands]
    stages = Stages({command.name: command.log for command in commands})
    supervisor = Supervisor(
        processes,
        RestartPolicy(settings.console.max_restarts, exit_when_told=settings.actors.exit_when_told),
        is_finished=lambda: False,
        log=say,
        last_error=stages.take_error,
    )
    try:
        with StopSignals() as signals:
            return _watch(supervisor, commands, settings, say, lambda: signals.times_urged)
    finally:
        guard.close()


def _grace_s(settings: Settings) -> float:
    return settings.actors.drain_s + ENDING_S


def _watch(
    supervisor: Supervisor,
    commands: Sequence[Command],
    settings: Settings,
    say: Callable[[str], None],
    times_urged: Callable[[], int],
) -> int:
    code = settings.actors.exit_when_told
    try:
        supervisor.start()
        for command in commands:
            say(f"{_described(command)}; its log is {command.log}")
        outcome = _until_the_end(supervisor)
        if outcome is None:
            say("all actors have drained: the run has ended")
            return 0
        say(f"{outcome.reason}: {outcome.error or 'it ended without a word'}")
        code = SETTINGS_ERROR if outcome.code == SETTINGS_ERROR else FAILED
    except KeyboardInterrupt:
        say("the actors drain; once more ends them at once")
    killed = supervisor.stop(timeout_s=_grace_s(settings), times_urged=times_urged)
    if times_urged():
        return STOPPED
    if killed:
        say(f"had to be killed: {', '.join(killed)}")
    return code


def _until_the_end(supervisor: Supervisor) -> RunOutcome | None:
    """Return the failure; None once all actors have drained."""
    while not supervisor.is_over:
        outcome = supervisor.tick()
        if outcome is not None:
            return outcome
        time.sleep(SUPERVISE_EVERY_S)
    return None


def _described(command: Command) -> str:
    cards = command.environment.get("CUDA_VISIBLE_DEVICES")
    return f"{command.name} on {'GPU ' + cards if cards else 'the CPU'}"


# --------------------------------------------------------------------------------------------------
# `nyala actor`, `agents`, `learner`, `broker`: one process of a run, started by hand.

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def actor(  # noqa: PLR0917 - typer calls it by name
    config: Config = None,
    config_option: ConfigOption = None,
    overrides: Overrides = None,
    count: Annotated[
        int | None,
        typer.Option(min=1, help="Actors to start; with --gpus one for each card by default."),
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            metavar="all|0,1,...",
            help="Cards for them, one each, or as many as each is split over.",
        ),
    ] = None,
    teacher: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Score finished episodes as this teacher instead."),
    ] = None,
) -> None:
    """Join a run with one more actor, or one more teacher.

    It may leave at any time, with Ctrl-C or without. With the run's folder it takes the address
    and the keys from there. On another machine give it the file that `nyala join-pack` wrote, with
    which it registers a key of its own.

    With `--count` or `--gpus` several are started and kept up; Ctrl-C drains all of them. With
    `--teacher` they make no episodes, but score those that are finished (docs/fleet.md).

    Example: `nyala actor runs/demo`, `nyala actor site-a.nyala --gpus all`
    """
    path, overrides = _opened(one_of(config, config_option), overrides or [])
    flags = () if teacher is None else ("--teacher", teacher)
    if count is None and gpus is None:
        _become("actor", "actors", path, overrides, flags)
    settings = settings_of(path, overrides)
    alone = role_command("actor", "actors", path, overrides, settings)
    if teacher is not None:
        arguments = (*alone.arguments, *flags)
        alone = replace(alone, name=f"teacher-{teacher}", arguments=arguments)
    placed = actor_commands(alone, settings, count=count, gpus=gpus)
    console = Console()
    raise typer.Exit(run_group(placed, settings, lambda text: print_line(console, text)))


@app.command()
def learner(  # noqa: PLR0917 - typer calls it by name
    config: Config = None,
    config_option: ConfigOption = None,
    overrides: Overrides = None,
    nodes: Annotated[int, typer.Option(min=1, help="Machines of the learner.")] = 1,
    node_rank: Annotated[int, typer.Option(min=0, help="This one; 0 has rank 0.")] = 0,
    rendezvous: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where node 0 listens for the others.")
    ] = "",
    trust_checkpoint: TrustCheckpoint = None,
) -> None:
    """Run the learner of a run.

    It begins at the newest checkpoint if there is one. On several machines the same command with
    their number is started on each (docs/parallelism.md).

    Example: `nyala learner --config runs/demo/config.yaml`
    """
    path = one_of(config, config_option)
    settings = settings_of(path, overrides or [])
    if trust_checkpoint is not None:
        from learner.checkpointing import resume  # noqa: PLC0415 - torch

        resume.trust_checkpoint(settings.run, trust_checkpoint)
    if node_rank == 0:
        keep_settings(settings)
    flags: tuple[str, ...] = ()
    if nodes > 1:
        flags = ("--nodes", str(nodes), "--node-rank", str(node_rank), "--rendezvous", rendezvous)
    _become("learner", "learner", path, overrides, flags)


@app.command()
def broker(
    config: Config = None, config_option: ConfigOption = None, overrides: Overrides = None
) -> None:
    """Run the broker of a run.

    It stands between the actors and the replay buffer in Redis, keeps nothing, and may be
    restarted at any time.

    Example: `nyala broker --config runs/demo/config.yaml`
    """
    _become("broker", "broker", one_of(config, config_option), overrides)


@app.command()
def agents(
    config: Config = None,
    config_option: ConfigOption = None,
    overrides: Overrides = None,
    should_print: Annotated[
        bool,
        typer.Option(
            "--print",
            help="Start no command: print URL, key and task of each conversation as a JSON line.",
        ),
    ] = False,
) -> None:
    """Host agents of a run, whose turns they make with loops of their own.

    Each conversation is one start of `agents.command`, which asks the model at the address in
    OPENAI_BASE_URL. On the run's own machine the host makes a key; on another one it needs the
    files host.key and broker.pub (`nyala keys add host --role host`).

    Example: `nyala agents runs/demo`, `nyala agents runs/demo --print`
    """
    path = one_of(config, config_option)
    settings = settings_of(path, overrides or [])
    keys = settings.keys_folder
    if (keys / "broker.key").exists():
        make_client(keys, HOST, role=HOST)
    _become("agents", "agents", path, overrides, ("--print",) if should_print else ())


def _opened(path: Path, overrides: list[str]) -> tuple[Path, list[str]]:
    """Unpack a join-pack; return any other path as it is."""
    return open_pack(path, overrides) if is_pack(path) else (path, overrides)


def _become(
    role: str,
    package: str,
    path: Path,
    overrides: list[str] | None,
    flags: Sequence[str] = (),
) -> NoReturn:
    """Turn this process into a role's: signals and exit code are then the role's own."""
    settings = settings_of(path, overrides or [])
    command = role_command(role, package, path, overrides or [], settings)
    arguments = (*command.arguments, *flags)
    os.execve(  # noqa: S606 - our own interpreter, with arguments that we built
        arguments[0], arguments, dict(command.environment)
    )
