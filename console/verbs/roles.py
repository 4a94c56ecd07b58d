"""`nyala actor`, `learner`, `broker`: one process of a run, started by hand."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from console.arguments import Config, ConfigOption, Overrides, TrustCheckpoint, one_of
from console.run.plan import role_command
from console.run.run_folder import settings_of

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def actor(
    config: Config = None, config_option: ConfigOption = None, overrides: Overrides = None
) -> None:
    """Join a run with one more actor.

    It may leave at any time, with Ctrl-C or without. With the run's folder it takes the address
    and the keys from there. On another machine give it a copy of the run's config.yaml and of
    broker.pub and enrolment.key; it registers a key of its own. Or give it one as actor.key.

    Example: `nyala actor runs/demo`
    """
    _become("actor", "actors", one_of(config, config_option), overrides)


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
    if trust_checkpoint is not None:
        from learner.checkpointing import trust  # noqa: PLC0415 - torch

        trust.trust_checkpoint(settings_of(path, overrides or []).run, trust_checkpoint)
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
