"""The settings of a run: one frozen table per role or concern, plus `run` for what roles share.

Names, types, defaults and ranges are in `tables/`; reading files, overrides and the wording of
errors in `loader.py`. Two levels deep: `table.key`. A role is handed `run` and its own tables only.
"""

from __future__ import annotations

from pydantic import model_validator

from .agreement import disagreements
from .tables.actors import ActorSettings
from .tables.algorithm import AlgorithmSettings
from .tables.base import Table
from .tables.broker import BrokerSettings
from .tables.buffer import BufferSettings
from .tables.console import ConsoleSettings
from .tables.critic import CriticSettings
from .tables.guards import GuardSettings
from .tables.learner import LearnerSettings
from .tables.replay import ReplaySettings
from .tables.rewards import RewardSettings
from .tables.run import RunSettings

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
