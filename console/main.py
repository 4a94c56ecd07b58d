"""`nyala`: the table of its verbs, and how their errors reach a person.

A verb's module is imported when the verb is called, so that `nyala --help` answers at once.
"""

from __future__ import annotations

import errno
import importlib
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from configs.errors import NyalaError
from configs.printable import printable_lines

from .bare_settings import refuse_bare_settings
from .typed import as_typed

SETTINGS_ERROR = 2  # as for a role's process: a person has to change something

VERBS = {
    "new": (
        "console.verbs.new",
        "Write a new folder: settings, a reward, an environment, data, a test.",
    ),
    "up": ("console.verbs.up", "Start a whole run on this machine."),
    "doctor": (
        "console.doctor.command",
        "Check machine, settings or a run, with a remedy for each fault.",
    ),
    "status": ("console.verbs.status", "Show how far a run is."),
    "top": ("console.live.top", "Watch a run."),
    "logs": ("console.live.logs", "Show the logs of a run."),
    "stop": ("console.live.stop", "Stop a run on this machine."),
    "samples": ("console.samples.command", "Show texts that a run has sampled."),
    "report": ("console.report.command", "Write a run, or several, as one HTML file."),
    "compare": (
        "console.compare.command",
        "Compare two runs on the held-out questions that both were asked.",
    ),
    "sweep": ("console.sweep.command", "Make a run for each combination of values, or search."),
    "try": ("console.samples.try_command", "Ask the newest model of a run."),
    "actor": ("console.verbs.roles", "Join a run with one more actor."),
    "join-pack": (
        "console.join_pack.command",
        "Write one file with which another machine joins a run.",
    ),
    "learner": ("console.verbs.roles", "Run the learner of a run."),
    "broker": ("console.verbs.roles", "Run the broker of a run."),
    "keys": ("console.verbs.keys", "Make the keys of a cluster, and choose who may connect."),
    "buffer": ("console.verbs.buffer", "Look into the replay buffer of a run."),
    "weights": ("console.verbs.weights", "Look at the weights that a run has published."),
    "checkpoint": (
        "console.checkpoints.command",
        "List, verify, export and remove the checkpoints of a run.",
    ),
    "settings": (
        "console.verbs.reference",
        "List all settings, with unit, values, default, and when to change them.",
    ),
    "losses": ("console.verbs.reference", "List the mathematics that settings can choose."),
    "metrics": ("console.verbs.reference", "List all figures of a run, with unit and meaning."),
    "schema": ("console.verbs.reference", "Print the JSON schema of the settings."),
    "data": ("console.verbs.data", "Look at a dataset before a run is trained on it."),
    "env": ("console.verbs.env", "Play a few episodes of an environment."),
    "init-model": ("console.verbs.init_model", "Make the model that a run begins with."),
    "chaos": ("console.chaos.command", "Hurt a live run on purpose and record what happened."),
}
"""Verb -> the module whose `app` has it, or is it, and its line in the help."""


UNWRITABLE = dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space") | dict.fromkeys(
    (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR), "let your user write there"
)
UNWRITABLE[errno.EEXIST] = "move the file of that name away"
"""Errors of a place that a person has to change -> the next step."""


class Verbs(TyperGroup):
    """Imports a verb when it is called; turns errors of ours into their text and an exit code."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the verb, with its own arguments and help."""
        name, _, rest = super().resolve_command(ctx, args)
        command = _load(str(name))
        flags = {
            flag: not getattr(each, "is_flag", False)
            for each in command.params
            for flag in each.opts
        }
        refuse_bare_settings(rest, flags)
        return name, command, rest

    def invoke(self, ctx: Any) -> Any:
        """Carry the verb out."""
        try:
            return super().invoke(ctx)
        except NyalaError as error:
            _refuse(str(error))
            raise typer.Exit(SETTINGS_ERROR) from error
        except OSError as error:
            if error.errno not in UNWRITABLE:
                raise
            _refuse(
                f"{error.filename or 'the disk'} must be writable, got: {error.strerror}; "
                f"{UNWRITABLE[error.errno]}, or choose another with --set run.directory=FOLDER"
            )
            raise typer.Exit(SETTINGS_ERROR) from error


app = typer.Typer(
    cls=Verbs,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # its help loads 0.4 s worth of libraries
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Nyala trains language models by reinforcement learning: vLLM actors sample, one learner "
    "trains, and an actor may come or go at any second.\n\n"
    "Begin with `nyala up configs/demo.yaml`; look at it with `nyala status runs/demo`.",
)


def _refuse(text: str) -> None:
    print(printable_lines(as_typed(f"nyala: {text}")), file=sys.stderr)


def _load(verb: str) -> Any:
    module, _ = VERBS[verb]
    command: Any = typer.main.get_command(importlib.import_module(module).app)
    return getattr(command, "commands", {}).get(verb, command)


for _verb, (_, _line) in VERBS.items():
    app.command(_verb, help=_line)(lambda: None)  # a name and a line: the rest is `_load`'s
