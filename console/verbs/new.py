"""Beginnings of a run: `nyala new` makes a project's folder, `nyala init-model` a model."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from configs.errors import SettingsError
from console.command_line import Config, ConfigOption, Overrides, one_of
from console.display.display import print_line
from console.run.init_model import make_if_needed
from console.run.own_files import resolve
from console.run.run_folder import settings_of

TEMPLATES = Path(__file__).parents[1] / "new_project"
FILES = {
    "settings.yaml": "PROJECT.yaml",
    "rewards.py": "rewards.py",
    "env.py": "env.py",
    "project_test.txt": "test_PROJECT.py",
}
ROWS = 1000  # of data.jsonl

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the project, a new folder.")],
) -> None:
    """Write a new folder: settings, a reward, an environment, data, a test.

    They work as they are: in that folder `nyala up NAME.yaml` trains a small model on two cores.
    Then change one after the other into your own.

    Example: `nyala new mine`
    """
    if not re.fullmatch(r"[a-z][a-z0-9_-]{0,40}", name):
        raise SettingsError(
            f"the name of a project must be small letters, digits, - and _, got {name!r}"
        )
    folder = Path(name)
    if folder.exists():
        raise SettingsError(f"{folder.absolute()} must be a new folder, and it is there already")
    folder.mkdir()
    for template, target in FILES.items():
        text = (TEMPLATES / template).read_text(encoding="utf-8").replace("PROJECT", name)
        (folder / target.replace("PROJECT", name)).write_text(text, encoding="utf-8")
    (folder / "data.jsonl").write_text(reversals(), encoding="utf-8")
    say = Console()
    print_line(say, f"{folder}/  {name}.yaml, rewards.py, env.py, data.jsonl, test_{name}.py")
    print_line(say, f"next:  cd {folder}  then  nyala up {name}.yaml --dry-run")


def reversals() -> str:
    """Write the rows of `data.jsonl`: numbers of three to five digits, and the same backwards."""
    numbers = random.Random(0).sample(range(100, 100_000), ROWS)
    rows = ({"question": f"{n}>", "answer": str(n)[::-1]} for n in numbers)
    return "".join(json.dumps(row) + "\n" for row in rows)


@app.command("init-model")
def init_model(
    config: Config = None, config_option: ConfigOption = None, overrides: Overrides = None
) -> None:
    """Make the model that a run begins with.

    A small character model, for settings with `run.model: init`; `nyala up` does it by itself. It
    is kept in the run's folder and made again only if settings that it depends on have changed.

    Example: `nyala init-model configs/demo.yaml --set learner.warm_start_steps=30`
    """
    settings = resolve(settings_of(one_of(config, config_option), overrides or []))
    if settings.run.model != "init":
        print(f"run.model is {settings.run.model}: nothing is to be made")
        return
    target = settings.run.folder / "init"
    if not make_if_needed(settings, target, Console()):
        print(f"{target} is already what these settings make")
