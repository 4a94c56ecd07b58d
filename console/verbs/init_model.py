"""`nyala init-model`: the model that a run begins with, made ahead of the run."""

from __future__ import annotations

import typer
from rich.console import Console

from console.command_line import Config, ConfigOption, Overrides, one_of
from console.run.init_model import make_if_needed
from console.run.own_files import resolve
from console.run.run_folder import settings_of

app = typer.Typer(add_completion=False, rich_markup_mode=None)


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
