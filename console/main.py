"""`nyala`: the verbs, what they say of themselves, and nothing else.

Heavy libraries are imported by the verb that needs them: `nyala --help` answers at once.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from console.verbs.buffer import app as buffer_verbs
from console.verbs.keys import app as keys_app
from console.verbs.weights import app as weight_verbs

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # its help loads 0.4 s worth of libraries
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Nyala trains language models by reinforcement learning: vLLM actors sample, one learner "
    "trains, and an actor may come or go at any second.\n\n"
    "Begin with `nyala up configs/demo.yaml`; look at it with `nyala status runs/demo`.",
)

app.add_typer(buffer_verbs, name="buffer")
app.add_typer(keys_app, name="keys")
app.add_typer(weight_verbs, name="weights")

Config = Annotated[
    Path | None,
    typer.Argument(
        metavar="CONFIG", help="A settings file, or the folder of a run such as runs/demo."
    ),
]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="The same, as a flag.", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="TABLE.KEY=VALUE",
        help="Change one setting, as in --set learner.lr=1e-4; may be given several times.",
        show_default=False,
    ),
]


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
        bool, typer.Option("--dry-run", help="Check everything, start nothing, show the settings.")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Archive an earlier run of this name and begin anew.")
    ] = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="Print lines instead of a live display.")
    ] = False,
) -> None:
    """Start a whole run on this machine.

    Starts Redis, broker, learner and actors, restarts what dies, and stops cleanly with Ctrl-C. The
    same command again goes on from the newest checkpoint; a run that has finished is reported.

    Example: `nyala up configs/demo.yaml --method GSPO --set actors.count=3`
    """
    from configs.errors import SettingsError
    from console.verbs.up import Launch, run_up
    from learner.algorithm.methods import overrides_of

    try:
        of_method = overrides_of(method) if method else []
    except SettingsError as error:
        _refuse(error)
    launch = Launch(
        _one_of(config, config_option),
        of_method + (overrides or []),
        fresh=fresh,
        dry_run=dry_run,
        plain=plain,
    )
    raise typer.Exit(run_up(launch))


@app.command()
def actor(
    config: Config = None, config_option: ConfigOption = None, overrides: Overrides = None
) -> None:
    """Join a run with one more actor.

    It may leave at any time, with Ctrl-C or without. With the run's folder it takes the address
    and the keys from there. On another machine give it a copy of the run's config.yaml and of
    actor.key and broker.pub.

    Example: `nyala actor runs/demo`
    """
    _become("actor", "actors", _one_of(config, config_option), overrides)


@app.command()
def learner(
    config: Config = None, config_option: ConfigOption = None, overrides: Overrides = None
) -> None:
    """Run the learner of a run.

    It begins at the newest checkpoint if there is one.

    Example: `nyala learner --config runs/demo/config.yaml`
    """
    _become("learner", "learner", _one_of(config, config_option), overrides)


@app.command()
def broker(
    config: Config = None, config_option: ConfigOption = None, overrides: Overrides = None
) -> None:
    """Run the broker of a run.

    It stands between the actors and the replay buffer in Redis, keeps nothing, and may be
    restarted at any time.

    Example: `nyala broker --config runs/demo/config.yaml`
    """
    _become("broker", "broker", _one_of(config, config_option), overrides)


@app.command()
def status(
    run: Annotated[Path, typer.Argument(help="The folder of a run, such as runs/demo.")],
) -> None:
    """Show how far a run is.

    Also where its tasks are, and which actors sample.

    Example: `nyala status runs/demo`
    """
    from rich.console import Console

    from configs.errors import NyalaError
    from console.verbs.status import print_status

    try:
        print_status(run, Console())
    except NyalaError as error:
        _refuse(error)


@app.command("init-model")
def init_model(
    config: Config = None,
    config_option: ConfigOption = None,
    overrides: Overrides = None,
) -> None:
    """Make the model that a run begins with.

    A small character model, for settings with `run.model: init`; `nyala up` does it by itself. It
    is kept in the run's folder and made again only if settings that it depends on have changed.

    Example: `nyala init-model configs/demo.yaml --set learner.warm_start_steps=30`
    """
    from rich.console import Console

    from configs.errors import NyalaError
    from console.run.init_model import make_if_needed
    from console.run.plan import resolve
    from console.run.run_folder import settings_of

    try:
        settings = resolve(settings_of(_one_of(config, config_option), overrides or []))
        target = settings.run.folder / "init"
        if not make_if_needed(settings, target, Console()):
            print(f"{target} is already what these settings make")
    except NyalaError as error:
        _refuse(error)


@app.command()
def chaos(  # noqa: PLR0917 - typer calls it by name
    config: Config = None,
    overrides: Overrides = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="NAME", help="This fault; may be given several times."),
    ] = None,
    engine: Annotated[
        str | None, typer.Option("--engine", help="Of the actors: torch (default) or vllm.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="New folder for table, runs and logs.")
    ] = None,
    long: Annotated[
        bool,
        typer.Option("--long", help="Several matrices, then whole runs whose actors keep dying."),
    ] = False,
    kill_run: Annotated[
        bool, typer.Option("--kill-run", help="Only the whole runs whose actors keep dying.")
    ] = False,
    names: Annotated[bool, typer.Option("--list", help="Name the faults and end.")] = False,
) -> None:
    """Hurt a live run on purpose and write down what happened.

    Starts a small run of its own on this machine, injects one fault after the other, and writes a
    table: how soon each was noticed, how soon all work went on, what was lost, what still held.

    Example: `nyala chaos --only actor-kill`
    """
    from console.chaos.command import Wish, list_faults, run_chaos

    if names:
        list_faults()
        return
    wish = Wish(config, tuple(overrides or ()), tuple(only or ()), engine, out, long, kill_run)
    raise typer.Exit(run_chaos(wish))


@app.command()
def losses(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="One name, or a method such as DAPO.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the tables of docs/algorithms.md.")
    ] = False,
) -> None:
    """List the mathematics that settings can choose.

    Advantages, corrections, surrogates and aggregations with formula, paper, defaults and when to
    use them; then which of them together are a method of the field.

    Example: `nyala losses tis`
    """
    from configs.errors import NyalaError
    from console.verbs.losses import show_losses  # imports torch

    try:
        show_losses(name, as_json=as_json, markdown=markdown)
    except NyalaError as error:
        _refuse(error)


@app.command()
def schema() -> None:
    """Print the JSON schema of the settings.

    Editors complete and check settings files with it.

    Example: `nyala schema > configs/settings.schema.json`
    """
    from configs.loader import json_schema

    sys.stdout.write(json_schema())


def _one_of(argument: Path | None, option: Path | None) -> Path:
    if (argument is None) == (option is None):
        raise typer.BadParameter("give one settings file or run folder, as in configs/demo.yaml")
    return argument or option or Path()


def _become(role: str, package: str, path: Path, overrides: list[str] | None) -> NoReturn:
    """Turn this process into a role's: signals and exit code are then the role's own."""
    from configs.errors import NyalaError
    from console.run.plan import role_command
    from console.run.run_folder import settings_of

    try:
        settings = settings_of(path, overrides or [])
    except NyalaError as error:
        _refuse(error)
    command = role_command(role, package, path, overrides or [], settings)
    os.execve(  # noqa: S606 - our own interpreter, with arguments that we built
        command.arguments[0], command.arguments, dict(command.environment)
    )


def _refuse(error: Exception) -> NoReturn:
    print(f"nyala: {error}", file=sys.stderr)
    raise SystemExit(2)
