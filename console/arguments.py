"""Arguments and options that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
        "write it. Loading one of an earlier release can run code of whoever wrote it.",
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
