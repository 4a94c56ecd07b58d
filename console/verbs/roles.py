"""`nyala actor`, `learner`, `broker`: one process of a run, started by hand."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from console.actor_group.group import run_group
from console.actor_group.plan import actor_commands
from console.arguments import Config, ConfigOption, Overrides, TrustCheckpoint, one_of
from console.display.display import print_line
from console.join_pack.pack import is_pack, open_pack
from console.run.plan import keep_settings, role_command
from console.run.run_folder import settings_of

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def actor(
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
) -> None:
    """Join a run with one more actor.

    It may leave at any time, with Ctrl-C or without. With the run's folder it takes the address
    and the keys from there. On another machine give it the file that `nyala join-pack` wrote, with
    which it registers a key of its own.

    With `--count` or `--gpus` several are started and kept up; Ctrl-C drains all of them.

    Example: `nyala actor runs/demo`, `nyala actor site-a.nyala --gpus all`
    """
    path, overrides = _opened(one_of(config, config_option), overrides or [])
    if count is None and gpus is None:
        _become("actor", "actors", path, overrides)
    settings = settings_of(path, overrides)
    alone = role_command("actor", "actors", path, overrides, settings)
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
        from learner.checkpointing import trust  # noqa: PLC0415 - torch

        trust.trust_checkpoint(settings.run, trust_checkpoint)
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


def _opened(path: Path, overrides: list[str]) -> tuple[Path, list[str]]:
    """Unpack a join-pack; anything else is as it was given."""
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
