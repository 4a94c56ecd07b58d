"""All tables of settings in one model; `settings.py` adds the rules between tables."""

from __future__ import annotations

from configs.tables.actors import ActorSettings, FleetSettings
from configs.tables.algorithm import AlgorithmSettings
from configs.tables.base import Table
from configs.tables.broker import BrokerSettings
from configs.tables.buffer import BufferSettings, ReplaySettings
from configs.tables.console import ConsoleSettings
from configs.tables.critic import CriticSettings
from configs.tables.guards import GuardSettings
from configs.tables.learner import LearnerSettings
from configs.tables.parallel import ParallelSettings
from configs.tables.rewards import RewardSettings
from configs.tables.run import RunSettings
from configs.tables.trackers import TrackerSettings


class AllTables(Table):
    """One table per role or concern, and `run` for what roles share."""

    run: RunSettings
    buffer: BufferSettings = BufferSettings()
    broker: BrokerSettings = BrokerSettings()
    actors: ActorSettings = ActorSettings()
    learner: LearnerSettings = LearnerSettings()
    parallel: ParallelSettings = ParallelSettings()
    rewards: RewardSettings = RewardSettings()
    replay: ReplaySettings = ReplaySettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    critic: CriticSettings = CriticSettings()
    guards: GuardSettings = GuardSettings()
    fleet: FleetSettings = FleetSettings()
    trackers: TrackerSettings = TrackerSettings()
    console: ConsoleSettings = ConsoleSettings()
