"""The command line: verbs, arguments that they share, and commands as a person types them."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from configs.errors import SettingsError

# --------------------------------------------------------------------------------------------------
# The verbs of `nyala`: each with its module and its line in the help.

VERBS = {
    "new": (
        "console.verbs.new",
        "Write a new folder: settings, a reward, an environment, data, a test.",
    ),
    "up": ("console.verbs.up", "Start a whole run on this machine."),
    "sft": (
        "console.verbs.sft",
        "Train the model of a run on demonstrations, before it is rewarded.",
    ),
    "doctor": (
        "console.doctor.command",
        "Check machine, settings or a run, with a remedy for each fault.",
    ),
    "status": ("console.verbs.status", "Show how far a run is."),
    "top": ("console.live.top", "Watch a run as `nyala up` shows it."),
    "logs": ("console.live.logs", "Show the logs of a run."),
    "stop": ("console.live.stop", "Stop a run on this machine."),
    "samples": ("console.samples.command", "Show texts that a run has sampled."),
    "report": ("console.report.write", "Write a run, or several, as one HTML file."),
    "compare": (
        "console.verbs.compare",
        "Compare two runs on the held-out questions that both were asked.",
    ),
    "sweep": ("console.sweep.sweep", "Make a run for each combination of values, or search."),
    "try": ("console.samples.try_command", "Ask the newest model of a run."),
    "eval": (
        "console.verbs.evaluate",
        "Ask a model the held-out questions of a run, as its evaluations do, and train nothing.",
    ),
    "actor": ("console.verbs.roles", "Join a run with one more actor, or one more teacher."),
    "agents": (
        "console.verbs.roles",
        "Host agents of a run, whose turns they make with loops of their own.",
    ),
    "join-pack": (
        "console.verbs.join_pack",
        "Write one file with which another machine joins a run.",
    ),
    "cache": (
        "console.verbs.cache",
        "Carry compiled code to another machine of the same kind.",
    ),
    "runs": ("console.live.runs", "List the runs of a Redis."),
    "fleet": (
        "console.verbs.fleet",
        "Write recipes for Kubernetes, Slurm or SkyPilot, and follow the number of actors.",
    ),
    "learner": ("console.verbs.roles", "Run the learner of a run."),
    "replay": ("console.verbs.replay", "Train again on batches that a run has kept."),
    "broker": ("console.verbs.roles", "Run the broker of a run."),
    "keys": ("console.verbs.keys", "Make the keys of a cluster, and choose who may connect."),
    "buffer": ("console.verbs.buffer", "Look into the replay buffer of a run."),
    "weights": ("console.verbs.weights", "Look at the weights that a run has published."),
    "checkpoint": (
        "console.verbs.checkpoints",
        "List, verify, export and remove the checkpoints of a run.",
    ),
    "push": (
        "console.verbs.push",
        "Upload the trained model of a run to the Hugging Face hub.",
    ),
    "settings": (
        "console.verbs.reference",
        "List all settings, with unit, values, default, and when to change them.",
    ),
    "losses": ("console.verbs.reference", "List the mathematics that settings can choose."),
    "metrics": ("console.verbs.reference", "List all figures of a run, with unit and meaning."),
    "messages": (
        "console.verbs.reference",
        "List errors, refusals, alerts and warnings with cause and cure.",
    ),
    "schema": ("console.verbs.reference", "Print the JSON schema of the settings."),
    "data": ("console.verbs.data", "Look at a dataset before a run is trained on it."),
    "env": ("console.verbs.env", "Play a few episodes of an environment."),
    "init-model": ("console.verbs.new", "Make the model that a run begins with."),
}
"""Verb -> the module whose `app` has it, or is it, and its line in the help."""

if find_spec("lab"):  # in a checkout: neither the wheel nor the image has it
    VERBS["chaos"] = ("lab.command", "Hurt a live run on purpose and record what happened.")


# --------------------------------------------------------------------------------------------------
# The program as it was typed, so that the commands in hints can be pasted.
#
# `nyala` where that is on the path; `./run`, or a path to either, where it was called so.

VARIABLE = "NYALA_TYPED"
"""Set by `./run` to its own name as it was typed."""

HINT = re.compile(rf"(?<![\w/])nyala(?= (?:{'|'.join(map(re.escape, VERBS))})\b)")


def program() -> str:
    """Return the first word of a command that calls this program again.

    It is `nyala` if that is on the path. Otherwise it is `./run`, or a path, as it was typed.
    """
    typed = os.environ.get(VARIABLE)
    if typed:
        return typed
    called = Path(sys.argv[0])
    installed = shutil.which("nyala")
    is_on_path = installed is not None and called.exists() and Path(installed).samefile(called)
    if called.name != "nyala" or is_on_path:
        return "nyala"
    return sys.argv[0]


def as_typed(text: str) -> str:
    """Replace `nyala` before a verb by `program()`, so that commands in a text can be pasted."""
    return HINT.sub(lambda _: program(), text)


# --------------------------------------------------------------------------------------------------
# Settings as other programs take them: `learner.lr=1e-4` alone, or `--learning_rate 1e-4`.

SET = "--set"


def refuse_bare_settings(arguments: Sequence[str], flags: Mapping[str, bool]) -> None:
    """Refuse a setting that is written as other programs take it, and show the form with `--set`.

    Such settings are `learner.lr=1e-4` without `--set`, and flags like `--learning_rate 1e-4`. A
    word that is like no setting passes. A verb without `--set` is not checked.

    Args:
        arguments: Arguments of a verb.
        flags: Flags of the verb -> whether a value follows.

    Raises:
        SettingsError: There is such a setting.
    """
    if SET not in flags:
        return
    for before, word, after in zip(
        ["", *arguments], arguments, [*arguments[1:], "VALUE"], strict=False
    ):
        name, equals, value = word.partition("=")
        is_flag = name.startswith("--") and name not in flags
        is_hydra = bool(equals) and "." in name and not flags.get(before)
        if (is_flag or is_hydra) and (meant := _setting_meant(name)):
            raise SettingsError(
                f"a setting must be given with {SET}, got {word}; write {SET} "
                f"{meant}={value or after}"
            )


def _setting_meant(name: str) -> str | None:
    """Return the setting that a name of another program may stand for."""
    from configs.error_text import suggest  # noqa: PLC0415 - loads all settings

    return suggest(name.lstrip("-+").split("."))


# --------------------------------------------------------------------------------------------------
# Arguments and options that several verbs share.

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
TrustCheckpoint = Annotated[
    str | None,
    typer.Option(
        "--trust-checkpoint",
        metavar="NAME",
        help="Make this checkpoint, such as step-000050, the run's own although the run did not "
        "write it.",
        show_default=False,
    ),
]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, such as runs/demo.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def one_of(argument: Path | None, option: Path | None) -> Path:
    """Return the settings file or run folder, given as an argument or as a flag.

    Raises:
        typer.BadParameter: It was given twice or not at all.
    """
    if (argument is None) == (option is None):
        raise typer.BadParameter("give one settings file or run folder, as in configs/demo.yaml")
    return argument or option or Path()
