"""The settings of a run: one frozen table per role or concern, plus `run` for what roles share.

Names, types, defaults and ranges are in `tables/`; reading files, overrides and the wording of
errors in `loader.py`. Two levels deep: `table.key`. A role is handed `run` and its own tables only.
"""

from __future__ import annotations

from pydantic import model_validator

from configs.tables.actors import ActorSettings
from configs.tables.algorithm import AlgorithmSettings
from configs.tables.base import Table
from configs.tables.broker import BrokerSettings
from configs.tables.buffer import BufferSettings
from configs.tables.console import ConsoleSettings
from configs.tables.critic import CriticSettings
from configs.tables.guards import GuardSettings
from configs.tables.learner import LearnerSettings
from configs.tables.replay import ReplaySettings
from configs.tables.rewards import RewardSettings
from configs.tables.run import RunSettings
from configs.validation.tables import disagreements

__all__ = [
    "ActorSettings",
    "AlgorithmSettings",
    "BrokerSettings",
    "BufferSettings",
    "ConsoleSettings",
    "CriticSettings",
    "GuardSettings",
    "LearnerSettings",
    "ReplaySettings",
    "RewardSettings",
    "RunSettings",
    "Settings",
    "Table",
]


class Settings(Table):
    """Everything one run needs to know."""

    run: RunSettings
    buffer: BufferSettings = BufferSettings()
    broker: BrokerSettings = BrokerSettings()
    actors: ActorSettings = ActorSettings()
    learner: LearnerSettings = LearnerSettings()
    rewards: RewardSettings = RewardSettings()
    replay: ReplaySettings = ReplaySettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    critic: CriticSettings = CriticSettings()
    guards: GuardSettings = GuardSettings()
    console: ConsoleSettings = ConsoleSettings()

    @model_validator(mode="after")
    def _tables_agree(self) -> Settings:
        if wrong := disagreements(self):
            raise ValueError("; ".join(wrong))
        return self
