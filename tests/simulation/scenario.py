"""What a simulation plays: its size, its speed, and its faults."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from buffer.client.scripts import LoadScript, load_script
from configs.settings import (
    ActorSettings,
    AgentSettings,
    AlgorithmSettings,
    BrokerSettings,
    BufferSettings,
    LearnerSettings,
    RunSettings,
    Settings,
)
from configs.tables.run import LIVE_AGENTS
from tests.simulation.made_up import POISONED
from tests.simulation.nemesis import Rates


@dataclass(frozen=True)
class Scenario:
    """What to simulate."""

    seed: int = 0
    actors: int = 10
    brokers: int = 2
    liars: int = 0
    """Actors that lie until one lease timeout after the faults."""
    teachers: int = 0
    """Processes of the one teacher; with any, all episodes must be scored."""
    hosts: int = 0
    """Hosts of live agents; with any, agents make the turns of all tasks."""
    work_s: float = 2.0
    """Longest time that an agent takes between two calls."""
    faulty_s: float = 30.0
    group_size: int = 4
    groups_per_batch: int = 4
    capacity: int = 6
    margin: float = 3.0
    """Room for all actors: those that wait ask ten times a second, which costs most here."""
    step_s: float = 0.5
    """Between two times that an actor's engine hands over tokens."""
    speeds: tuple[float, float] = (0.5, 1.5)
    """Least and most of what an actor's engine makes, over the usual."""
    broken_off: float = 0.0005
    """Share of an engine's hand-overs of a request in which it gives the request up."""
    poisoned: int = POISONED
    """One unit in so many has tasks that the environment cannot judge. Where thousands are made,
    ten of a thousand would die now and then by chance, and the run would pause."""
    train_s: float = 1.0
    snapshot_s: float = 1.0
    lease_timeout_s: float = 15.0
    """Other timeouts of actors and brokers are in proportion."""
    progress_timeout_s: float = 120.0
    max_policy_lag: int = 2
    checkpoint_every: int = 4
    check_every_s: float = 5.0
    rates: Rates = field(default_factory=Rates)
    certain_faults: tuple[str, ...] = ()
    """Of the nemesis: each strikes once at least, whatever the rates."""
    calm_batches: int = 5
    """After the last fault so many are trained."""
    loses_power_in_the_calm: bool = False
    """Whether the learner's disk loses power once more, when batches have been committed."""
    is_lost_in_the_calm: bool = True
    """Whether an actor dies once more when all is quiet, and its takeover is timed."""
    outage_s: tuple[float, float] = (0.1, 10.0)
    """How long the store is away."""
    scripts: LoadScript = load_script

    def settings(self, folder: Path) -> Settings:
        """The settings of the run."""
        return Settings(
            run=RunSettings(
                name="simulated",
                directory=folder,
                model="init",
                environment=LIVE_AGENTS if self.hosts else "talks",
                steps=10**6,
                group_size=self.group_size,
                groups_per_batch=self.groups_per_batch,
                max_policy_lag=self.max_policy_lag,
                eval_episodes=0,
            ),
            buffer=BufferSettings(margin=self.margin),
            broker=BrokerSettings(
                lease_timeout_s=self.lease_timeout_s,
                heartbeat_timeout_s=self.lease_timeout_s * 2 / 5,
                progress_timeout_s=self.progress_timeout_s,
            ),
            actors=ActorSettings(
                max_concurrent_episodes=self.capacity,
                snapshot_s=self.snapshot_s,
                heartbeat_s=self.lease_timeout_s * 2 / 15,
            ),
            learner=LearnerSettings(checkpoint_every=self.checkpoint_every),
            agents=AgentSettings(max_conversations=64),
            algorithm=AlgorithmSettings(
                teacher="a model" if self.teachers else None,
                teacher_in="actor" if self.teachers else "learner",
            ),
        )


DEATHS = (
    "crash",
    "broker_crash",
    "broker_crash_at_grant",
    "learner_crash",
    "store_rewind",
    "power_loss",
)


def brief_agents(seed: int) -> Scenario:
    """Fifteen seconds of faults while live agents talk, with a death of each role and a rewind."""
    return Scenario(
        seed=seed,
        actors=2,
        hosts=2,
        faulty_s=15.0,
        groups_per_batch=1,
        capacity=2,
        step_s=0.2,
        broken_off=0.002,
        snapshot_s=0.5,
        lease_timeout_s=10.0,
        max_policy_lag=100,  # no conversation is dropped for its age
        checkpoint_every=1,
        certain_faults=(*DEATHS, "host_crash"),
        calm_batches=2,
        is_lost_in_the_calm=False,
    )


def brief_teachers(seed: int) -> Scenario:
    """Ten seconds of faults while teachers score what actors make, with a death of each role."""
    return replace(
        brief(seed),
        liars=0,
        teachers=2,
        certain_faults=(*DEATHS, "teacher_crash"),
    )


def brief(seed: int) -> Scenario:
    """Ten seconds of faults, among them a death of each role and a rewind, in half a second."""
    return Scenario(
        seed=seed,
        actors=2,
        liars=seed % 2,
        faulty_s=10.0,
        groups_per_batch=1,
        capacity=4,
        broken_off=0.02,
        snapshot_s=0.5,
        lease_timeout_s=5.0,
        progress_timeout_s=6.0,
        checkpoint_every=1,
        certain_faults=DEATHS,
        calm_batches=2,
        loses_power_in_the_calm=True,
        is_lost_in_the_calm=False,
    )
