"""All tables of settings in one model; `settings.py` adds the rules between tables."""

from __future__ import annotations

from .actors import ActorSettings, FleetSettings
from .agents import AgentSettings
from .algorithm import AlgorithmSettings, CriticSettings, RewardSettings
from .base import SettingsTable
from .broker import BrokerSettings
from .buffer import BufferSettings, ReplaySettings
from .learner import GuardSettings, LearnerSettings, ParallelSettings
from .run import ConsoleSettings, RunSettings
from .sft import SftSettings
from .trackers import TrackerSettings


class AllTables(SettingsTable):
    """One table per role or concern, and `run` for what roles share."""

    run: RunSettings
    buffer: BufferSettings = BufferSettings()
    broker: BrokerSettings = BrokerSettings()
    actors: ActorSettings = ActorSettings()
    agents: AgentSettings = AgentSettings()
    learner: LearnerSettings = LearnerSettings()
    parallel: ParallelSettings = ParallelSettings()
    rewards: RewardSettings = RewardSettings()
    replay: ReplaySettings = ReplaySettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    critic: CriticSettings = CriticSettings()
    guards: GuardSettings = GuardSettings()
    fleet: FleetSettings = FleetSettings()
    sft: SftSettings = SftSettings()
    trackers: TrackerSettings = TrackerSettings()
    console: ConsoleSettings = ConsoleSettings()
