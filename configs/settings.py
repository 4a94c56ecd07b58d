"""Settings of a run: one frozen table per role or concern, plus `run` for what roles share.

Two levels deep: `table.key`. Names, types, defaults and ranges are in `tables/`, rules between
tables in `validation/`, files and overrides in `loader.py`, the wording of errors in
`error_text.py`. In the roles, the assembly takes the whole `Settings`, and what is below it only
the tables that it uses. The console takes the whole. Wrong settings raise pydantic's
ValidationError with every problem; `loader.load` raises SettingsError.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import model_validator

from configs.tables.actors import ActorSettings, FleetSettings
from configs.tables.agents import AgentSettings
from configs.tables.algorithm import AlgorithmSettings, CriticSettings, RewardSettings
from configs.tables.base import SettingsTable
from configs.tables.broker import BrokerSettings
from configs.tables.buffer import BufferSettings, ReplaySettings
from configs.tables.learner import GuardSettings, LearnerSettings, ParallelSettings
from configs.tables.run import ConsoleSettings, RunSettings
from configs.tables.sft import SftSettings
from configs.tables.trackers import TrackerSettings
from configs.validation.tables import disagreements

from .tables.all_tables import AllTables

__all__ = [
    "ActorSettings",
    "AgentSettings",
    "AlgorithmSettings",
    "BrokerSettings",
    "BufferSettings",
    "ConsoleSettings",
    "CriticSettings",
    "FleetSettings",
    "GuardSettings",
    "LearnerSettings",
    "ParallelSettings",
    "ReplaySettings",
    "RewardSettings",
    "RunSettings",
    "Settings",
    "SettingsTable",
    "SftSettings",
    "TrackerSettings",
]


class Settings(AllTables):
    """All settings of one run, checked together."""

    @model_validator(mode="after")
    def _tables_agree(self) -> Settings:
        if wrong := disagreements(self):
            raise ValueError("; ".join(wrong))
        return self

    @property
    def keys_folder(self) -> Path:
        """Folder with the keys of this run: `broker.keys`, or one in the run's own folder."""
        return self.broker.keys or self.run.folder / "keys"
