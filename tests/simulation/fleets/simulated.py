"""A simulated run whose actors are started and ended as it wants them, without other faults.

Broker, store, actors' loop and learner are those of every simulation; how many actors are wanted is
asked of the real `FleetWatch`, which sees what they have sent, and a scheduler looks at the answer
every half minute.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from buffer import operations
from buffer.record.episode import Episode
from configs import durable
from configs.settings import Settings
from learner.data.claims import ClaimedBatch
from learner.reporting.advice.advisor_thread import FleetWatch
from tests.configs.support.fleet.rates import LOOK_S, TICK_S, Hour
from tests.simulation.history import History
from tests.simulation.scenario import Scenario
from tests.simulation.simulation import Simulation, Slot
from tests.simulation.stand_in_time import stand_in
from tests.simulation.store import LearnersStore

SPEEDS = (0.85, 1.15)
"""Of actors, as in the model of rates."""


@dataclass(frozen=True)
class FleetScenario(Scenario):
    """A fleet of actors, and its bounds."""

    speeds: tuple[float, float] = SPEEDS
    broken_off: float = 0.0
    poisoned: int = 10**9
    margin: float = 1.0
    brokers: int = 1
    groups_per_batch: int = 24
    capacity: int = 4
    train_s: float = 30.0
    check_every_s: float = 120.0
    first: int = 1
    """Actors at the beginning."""
    max_actors: int = 16
    max_policy_lag: int = 2
    start_s: tuple[float, float] = (45.0, 90.0)
    """Least and most that an actor takes to start."""
    taken_at_s: tuple[float, ...] = ()
    """When a third of the actors is taken away, at once and without a word."""
    lasts_s: float = 1500.0

    def settings(self, folder: Path) -> Settings:
        settings = super().settings(folder)
        tables = {
            "run": {"max_policy_lag": self.max_policy_lag},
            "actors": {"count": self.first},
            "fleet": {"max_actors": self.max_actors},
        }
        return settings.model_copy(
            update={
                name: getattr(settings, name).model_copy(update=changes)
                for name, changes in tables.items()
            }
        )


class WatchedHistory(History):
    """Tells when a batch was there, and when it was trained."""

    on_sealed: Callable[[], None]
    on_trained: Callable[[], None]

    def sealed(self, batch: ClaimedBatch) -> None:
        super().sealed(batch)
        self.on_sealed()

    def trained(self, batch: ClaimedBatch, history: dict[int, list[int]]) -> None:
        super().trained(batch, history)
        self.on_trained()

    def check_makers(self, episode: Episode) -> None:
        """Nobody lies here."""


class FleetSimulation(Simulation):
    """Plays a scenario for its time; `hour` is how it went."""

    scenario: FleetScenario

    def __init__(self, scenario: FleetScenario, folder: Path) -> None:
        super().__init__(scenario, folder)
        history = WatchedHistory("simulated", scenario.group_size, self.loop.time)
        history.on_sealed, history.on_trained = self._sealed, self._trained
        self.history, self.server.watch = history, history.watch
        self.actors = [Slot(f"actor-{i}") for i in range(scenario.max_actors)]
        self.watch = FleetWatch(self.settings)
        self.hour = Hour([self.watch.wanted.actors])
        self._store = LearnersStore(self.server, self.settings.run.name)
        self._starting: dict[str, float] = {}
        """Slots whose actors are being started, and when they will be."""
        self._began_s = self._sealed_s = 0.0
        """The batch under way: when the one before it was trained, and when it was there."""
        self._is_training = False

    async def _story(self) -> None:
        for broker in self.brokers:
            self._start_broker(broker)
        self._start_learner()
        for slot in self.actors[: self.scenario.first]:
            self._starting[slot.name] = 0.0
        taken = list(self.scenario.taken_at_s)
        for tick in range(int(self.scenario.lasts_s / TICK_S)):
            now_s = tick * TICK_S
            if taken and now_s >= taken[0]:
                self._take(share=1 / 3)
                taken.pop(0)
            if tick % int(LOOK_S / TICK_S) == 0:
                self._follow(now_s)
            self._begin(now_s)
            await asyncio.sleep(TICK_S)
            self._count()

    def _follow(self, now_s: float) -> None:
        """Start or end actors, as a scheduler does; the newest end first."""
        present = [slot for slot in self.actors if self._is_there(slot)]
        goal = self.hour.wanted[-1]
        low, high = self.scenario.start_s
        for slot in [slot for slot in self.actors if not self._is_there(slot)][
            : max(0, goal - len(present))
        ]:
            self._starting[slot.name] = now_s + self.rng.uniform(low, high)
        for slot in present[goal:]:
            self._starting.pop(slot.name, None)
            if slot.actor is not None and slot.process is not None:
                self.history.hurt(slot.process.name)
                slot.actor.loop.stop()

    def _begin(self, now_s: float) -> None:
        for slot in self.actors:
            if self._starting.get(slot.name, math.inf) <= now_s:
                del self._starting[slot.name]
                super()._start_actor(slot)

    def _start_actor(self, slot: Slot) -> None:
        """Nobody starts an actor again but the scheduler."""

    def _take(self, *, share: float) -> None:
        serving = [slot for slot in self.actors if slot.process is not None]
        for slot in self.rng.sample(serving, math.ceil(share * len(serving))):
            self.kill_actor(slot, vanished=True)

    def _is_there(self, slot: Slot) -> bool:
        return slot.process is not None or slot.name in self._starting

    def _sealed(self) -> None:
        self._sealed_s, self._is_training = self.loop.time(), True

    def _trained(self) -> None:
        """Do what the learner's advisor does with a batch."""
        now_s = self.loop.time()
        waited_s = self._sealed_s - self._began_s
        if self.hour.batches == 0:
            self._began_s += waited_s  # the first waits for the start
            waited_s = 0.0
        self.hour.batches += 1
        self._store.trust(self.server.run_id)
        self.watch.observe_actors(now_s, self._store.run(operations.actors()))
        self.watch.batch(now_s, wait_s=waited_s, span_s=now_s - self._began_s)
        if self.watch.wanted.actors != self.hour.wanted[-1]:
            self.hour.wanted.append(self.watch.wanted.actors)
        self._began_s, self._is_training = now_s, False

    def _count(self) -> None:
        there = sum(map(self._is_there, self.actors))
        self.hour.actor_hours += there * TICK_S / 3600
        serving = sum(slot.process is not None for slot in self.actors)
        if self.hour.batches and serving >= self.hour.wanted[-1]:
            self.hour.settled_s += TICK_S
            self.hour.idle_s += TICK_S * (not self._is_training)


def simulated(scenario: FleetScenario) -> Hour:
    """Play a scenario in the simulator."""
    with tempfile.TemporaryDirectory() as folder:
        simulation = FleetSimulation(scenario, Path(folder))
        with (
            stand_in(simulation.loop, simulation.network, scenario.seed),
            mock.patch.object(durable, "DISK", simulation.disk),
        ):
            simulation.run()
        return simulation.hour
