"""Beginnings of a run: `nyala new` makes a project's folder, `nyala init-model` a model."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console

from actors.chat import read_prompt
from actors.environments.registry import make_dataset
from configs.errors import SettingsError
from configs.settings import RunSettings
from console.command_line import Config, ConfigOption, Overrides, one_of
from console.display.display import print_line
from console.run.card_memory import ModelShape
from console.run.checks.model import check_model, model_config, usual_rate
from console.run.init_model import make_if_needed
from console.run.own_files import resolve
from console.run.run_folder import settings_of

from .data import token_counter

TEMPLATES = Path(__file__).parents[1] / "new_project"
FILES = {
    "rewards.py": "rewards.py",
    "env.py": "env.py",
    "project_test.txt": "test_PROJECT.py",
}
ROWS = 1000  # of data.jsonl
PROMPT_STEP = 32  # limits of prompts are multiples of it

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the project, a new folder.")],
    model: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Directory or hub name of the model to train. Default: a small one is made.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write a new folder: settings, a reward, an environment, data, a test.

    They work as they are: in that folder `nyala up NAME.yaml` trains a small model on two cores, or
    the one that `--model` names. Then change one after the other into your own.

    Example: `nyala new mine --model models/smollm2-135m`
    """
    if not re.fullmatch(r"[a-z][a-z0-9_-]{0,40}", name):
        raise SettingsError(
            f"the name of a project must be small letters, digits, - and _, got {name!r}"
        )
    folder = Path(name)
    if folder.exists():
        raise SettingsError(f"{folder.absolute()} must be a new folder, and it is there already")
    given = None if model in {None, "init"} else _checked(str(model))
    values = {} if given is None else _values(given)
    folder.mkdir()
    for template, target in FILES.items():
        text = (TEMPLATES / template).read_text(encoding="utf-8").replace("PROJECT", name)
        (folder / target.replace("PROJECT", name)).write_text(text, encoding="utf-8")
    (folder / "data.jsonl").write_text(reversals() if given is None else sums(), encoding="utf-8")
    template = "settings.yaml" if given is None else "settings_of_model.yaml"
    text = (TEMPLATES / template).read_text(encoding="utf-8").replace("PROJECT", name)
    for place, value in values.items():
        text = text.replace(place, value)
    (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    say = Console()
    print_line(say, f"{folder}/  {name}.yaml, rewards.py, env.py, data.jsonl, test_{name}.py")
    print_line(say, f"next:  cd {folder}  then  nyala up {name}.yaml --dry-run")


def reversals() -> str:
    """Write the rows of `data.jsonl`: numbers of three to five digits, and the same backwards."""
    numbers = random.Random(0).sample(range(100, 100_000), ROWS)
    rows = ({"question": f"{n}>", "answer": str(n)[::-1]} for n in numbers)
    return "".join(json.dumps(row) + "\n" for row in rows)


def sums() -> str:
    """Write the rows of `data.jsonl` for a model that knows language."""
    chance = random.Random(0)
    pairs = [(chance.randrange(10, 1000), chance.randrange(10, 1000)) for _ in range(ROWS)]
    rows = ({"question": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in pairs)
    return "".join(json.dumps(row) + "\n" for row in rows)


def _checked(model: str) -> str:
    """Return a directory with its whole path, or a name, of a model that can be trained.

    Raises:
        SettingsError: It cannot.
    """
    path = Path(model).expanduser()
    found = str(path.resolve()) if path.exists() else model
    check_model(RunSettings(model=found, max_prompt_tokens=1, max_completion_tokens=1))
    return found


def _values(model: str) -> dict[str, str]:
    """Fit the settings to a model, and its tokenizer's view of the data."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "data.jsonl")
        path.write_text(sums(), encoding="utf-8")
        data = {"path": str(path), "prompt": "question", "answer": "answer", "scorer": "numeric"}
        run = RunSettings(model=model, environment="dataset", environment_settings=data)
        count = token_counter(run).prompt
        longest = max(count(read_prompt(row.prompt)) for row, _ in make_dataset(run).all_rows())
    config = model_config(run)
    assert config is not None, model
    parameters = ModelShape.of(config).parameters
    rate = usual_rate(parameters)
    return {
        "MODEL": json.dumps(model),
        "LONGEST": str(longest),
        "PROMPT_TOKENS": str(-(-longest // PROMPT_STEP) * PROMPT_STEP),
        "RATE": f"{rate:.0e}".replace("e-0", "e-"),
        "SIZE": f"{parameters / 1e6:,.0f}",
    }


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
