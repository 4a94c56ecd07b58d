"""`nyala`: its verbs on the command line, and how their errors reach a person.

A verb's module is imported when the verb is called, so that `nyala --help` answers at once.
"""

from __future__ import annotations

import errno
import importlib
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from configs.durable import private_files
from configs.errors import NyalaError, printable_lines

from .command_line import VERBS, as_typed, refuse_bare_settings

SETTINGS_ERROR = 2  # as for a role's process: a person has to change something

UNWRITABLE = dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space") | dict.fromkeys(
    (errno.EACCES, errno.EPERM, errno.EROFS), "let your user read and write it"
)
UNWRITABLE[errno.EEXIST] = "move the file of that name away"
UNWRITABLE[errno.ENOTDIR] = "move away the file that is in the place of one of its folders"
"""Errors of a place that a person has to change -> the next step."""


class Verbs(TyperGroup):
    """Imports a verb when it is called, and prints its errors on one line.

    Errors of Nyala, and of a file that cannot be read or written, become a line on stderr and exit
    code 2. Other exceptions pass.
    """

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the verb, with its own arguments and help.

        Raises:
            SettingsError: An argument is a setting without `--set`.
        """
        name, _, rest = super().resolve_command(ctx, args)
        command = _load(str(name))
        flags = {
            flag: not getattr(parameter, "is_flag", False)
            for parameter in command.params
            for flag in parameter.opts
        }
        refuse_bare_settings(rest, flags)
        return name, command, rest

    @private_files()
    def invoke(self, ctx: Any) -> Any:
        """Run the verb with its arguments."""
        try:
            return super().invoke(ctx)
        except NyalaError as error:
            _refuse(str(error))
            raise typer.Exit(SETTINGS_ERROR) from error
        except OSError as error:
            if error.errno not in UNWRITABLE:
                raise
            _refuse(
                f"{error.filename or 'the disk'} must be readable and writable, got: "
                f"{error.strerror}; {UNWRITABLE[error.errno]}, or name another place (for a run: "
                f"--set run.directory=FOLDER)"
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
