"""Weights & Biases: a run by its own package, offline unless the settings ask for more."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from configs.errors import SettingsError
from configs.settings import RunSettings
from configs.tables.trackers import WandbSettings

from .http_api import require_package
from .tracker import Parameters, SampleTable, TrackedFigures


class WandbRun:
    """A run of W&B, whose files are in this run's folder; all its lives have one id."""

    def __init__(self, settings: WandbSettings, run: RunSettings) -> None:
        self._settings, self._run_settings = settings, run
        self._wandb: Any = None
        self._run: Any = None

    def check_requirements(self) -> None:
        require_package("wandb")
        if self._settings.mode == "online" and not _has_key():
            raise SettingsError(
                "trackers.wandb.mode must be offline without a key of W&B, got online; set "
                "WANDB_API_KEY, or run `wandb login`"
            )

    def start_run(self, run_id: str | None, parameters: Parameters) -> str:
        """Begin or continue a run; code, the state of git and the terminal are not recorded."""
        self._wandb = import_module("wandb")
        settings, is_online = self._settings, self._settings.mode == "online"
        run_id = run_id or secrets.token_hex(4)
        try:
            self._run = self._wandb.init(
                project=settings.project,
                entity=settings.entity,
                name=self._run_settings.name,
                id=run_id,
                resume="allow" if is_online else None,
                mode=settings.mode,
                dir=str(self._run_settings.folder),
                config=dict(parameters),
                settings=self._wandb.Settings(
                    silent=True, console="off", disable_git=True, save_code=False
                ),
            )
        except self._wandb.errors.CommError as error:
            raise OSError(str(error)) from None
        except self._wandb.errors.Error as error:
            raise SettingsError(
                f"trackers.wandb must be a run that W&B accepts, got a refusal ({error}); change "
                "what it refuses, or leave it out with trackers.wandb=null"
            ) from None
        # Figures of an evaluation come behind those of later batches, which W&B's own steps forbid.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        return run_id

    def log(self, points: Sequence[TrackedFigures]) -> None:
        for point in points:
            self._run.log({"step": point.step, **point.figures})

    def table(self, table: SampleTable) -> None:
        rows = [list(row) for row in table.rows]
        wandb_table = self._wandb.Table(columns=list(table.columns), data=rows)
        self._run.log({"step": table.step, table.name: wandb_table})

    def take_model(self, folder: Path, on_progress: Callable[[], None]) -> None:
        """Do nothing: models stay in the run's folder."""

    def end_run(self, *, is_finished: bool) -> None:
        self._run.finish(exit_code=0 if is_finished else 1)


def _has_key() -> bool:
    """Whether there is a key, or a login of `wandb login`."""
    logins = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    return bool(os.environ.get("WANDB_API_KEY")) or (
        logins.is_file() and "wandb" in logins.read_text(encoding="utf-8", errors="replace")
    )
