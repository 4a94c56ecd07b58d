"""Faults and their times, all drawn from one generator.

Rates are per simulated hour and actor (or process); a scenario scales them. Every fault ends by
itself, so that when the nemesis rests the system has to find its way back.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.simulation.network import Weather

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation, Slot

STORM = Weather(lost=0.01, doubled=0.01, late=0.02)
LOST_REPLIES = 0.001  # of the store's
REWIND_S = 2.0  # `appendfsync everysec` loses at most this much


@dataclass(frozen=True)
class Rates:
    """Faults an hour."""

    crash: float = 12.0
    """Kills of each actor, half of them with the whole machine."""
    drain: float = 4.0
    """SIGTERMs of each actor."""
    pause: float = 8.0
    """Times that each actor is stopped, some for longer than a lease lasts."""
    partition: float = 8.0
    """Times that each actor is cut off."""
    broker_crash: float = 30.0
    broker_crash_at_grant: float = 10.0
    """Kills of a broker between what it grants and its answer."""
    broker_pause: float = 20.0
    store_away: float = 30.0
    store_rewind: float = 20.0
    learner_crash: float = 40.0
    learner_twin: float = 10.0
    """Times that a learner is stopped, another takes over, and the first one wakes up."""
    power_loss: float = 30.0
    """Of the learner's machine; most of them in the middle of what it writes next."""
    disk_full: float = 10.0
    host_crash: float = 20.0
    """Kills of each host of agents."""
    host_pause: float = 10.0
    teacher_crash: float = 20.0
    """Kills of each teacher."""
    teacher_pause: float = 10.0
    host_partition: float = 10.0


class Nemesis:
    """Strikes at random moments until told to rest."""

    def __init__(
        self,
        simulation: Simulation,
        rng: random.Random,
        rates: Rates,
        certain: Sequence[str] = (),
    ) -> None:
        self._world, self._rng = simulation, rng
        self._certain = [getattr(self, name) for name in certain]
        actors, brokers = len(simulation.actors), len(simulation.brokers)
        self._faults = {
            self.crash: rates.crash * actors,
            self.drain: rates.drain * actors,
            self.pause: rates.pause * actors,
            self.partition: rates.partition * actors,
            self.broker_crash: rates.broker_crash * brokers,
            self.broker_crash_at_grant: rates.broker_crash_at_grant * brokers,
            self.broker_pause: rates.broker_pause * brokers,
            self.store_away: rates.store_away,
            self.store_rewind: rates.store_rewind,
            self.learner_crash: rates.learner_crash,
            self.learner_twin: rates.learner_twin,
            self.power_loss: rates.power_loss,
            self.disk_full: rates.disk_full,
            self.host_crash: rates.host_crash * len(simulation.hosts),
            self.host_pause: rates.host_pause * len(simulation.hosts),
            self.teacher_crash: rates.teacher_crash * len(simulation.teachers),
            self.teacher_pause: rates.teacher_pause * len(simulation.teachers),
            self.host_partition: rates.host_partition * len(simulation.hosts),
        }

    async def rage(self, seconds: float) -> None:
        """Strike for so long, then leave only what heals by itself."""
        world = self._world
        world.network.weather, world.server.lost_replies = STORM, LOST_REPLIES
        ends_at = world.loop.time() + seconds
        for after_s, fault in self._moments(seconds):
            await asyncio.sleep(ends_at - seconds + after_s - world.loop.time())
            world.history.note(fault.__name__)
            world.trace.note(fault.__name__)
            fault()
        await asyncio.sleep(max(0.0, ends_at - world.loop.time()))
        world.network.weather, world.server.lost_replies = Weather(), 0.0
        if world.disk.loses_power_after is not None:  # nothing was written since
            world.lose_power(after_operations=0)

    def _moments(self, seconds: float) -> list[tuple[float, Callable[[], None]]]:
        """When each fault strikes: those that are certain once, the others by their rates."""
        rng, total = self._rng, sum(self._faults.values())
        found = [(rng.uniform(0.3, 1.0) * seconds, fault) for fault in self._certain]
        at_s = rng.expovariate(total / 3600) if total else seconds
        while at_s < seconds:
            [fault] = rng.choices(list(self._faults), list(self._faults.values()))
            found.append((at_s, fault))
            at_s += rng.expovariate(total / 3600)
        return sorted(found, key=lambda moment: moment[0])

    def crash(self) -> None:
        """SIGKILL, or the machine is gone and its connections stay open."""
        slot = self._rng.choice(self._world.actors)
        self._world.kill_actor(slot, vanished=self._rng.random() < 0.5)

    def drain(self) -> None:
        slot = self._rng.choice(self._world.actors)
        if slot.actor is not None and slot.process is not None:
            self._world.history.hurt(slot.process.name)
            slot.actor.loop.stop()

    def pause(self) -> None:
        """SIGSTOP, and SIGCONT after up to two lease timeouts."""
        self._pause(self._world.actors)

    def partition(self) -> None:
        self._cut(self._world.actors)

    def host_crash(self) -> None:
        slot = self._rng.choice(self._world.hosts)
        self._world.kill_host(slot, vanished=self._rng.random() < 0.5)

    def teacher_crash(self) -> None:
        slot = self._rng.choice(self._world.teachers)
        self._world.kill_actor(slot, vanished=self._rng.random() < 0.5)

    def teacher_pause(self) -> None:
        self._pause(self._world.teachers)

    def host_pause(self) -> None:
        self._pause(self._world.hosts)

    def host_partition(self) -> None:
        self._cut(self._world.hosts)

    def broker_crash(self) -> None:
        self._world.kill_broker(self._rng.choice(self._world.brokers))

    def broker_crash_at_grant(self) -> None:
        self._world.kill_broker_at_grant()

    def broker_pause(self) -> None:
        longest_s = self._world.scenario.lease_timeout_s * 5 / 3
        self._freeze(self._rng.choice(self._world.brokers), self._rng.uniform(0.5, longest_s))

    def store_away(self) -> None:
        """The server cannot be reached, and has lost nothing when it is back."""
        server = self._world.server
        server.is_away = True
        self._world.after(self._rng.uniform(*self._world.scenario.outage_s), self._back)

    def store_rewind(self) -> None:
        """Power loss: the server comes back as it was a moment ago."""
        world = self._world
        database, memory = world.server.database.copy(), world.history.now.copy()

        def strike() -> None:
            world.server.is_away = True
            world.server.begin_life(database)
            world.history.note("rewinds")
            world.history.now = memory
            world.agents.rewound_at = world.loop.time()
            world.after(self._rng.uniform(0.1, 3.0), self._back)

        world.after(self._rng.uniform(0.0, REWIND_S), strike)

    def learner_crash(self) -> None:
        self._world.kill_learner()

    def learner_twin(self) -> None:
        """Its host hangs, the supervisor starts another one, and the old one comes back."""
        self._world.replace_learner(wakes_after_s=self._rng.uniform(1.0, 20.0))

    def power_loss(self) -> None:
        """Checkpoints and lineages keep what was synced; a learner that writes dies of it."""
        is_later = self._rng.random() < 0.7
        self._world.lose_power(after_operations=is_later * self._rng.randint(1, 25))

    def disk_full(self) -> None:
        """The learner can save nothing for a while."""
        self._world.disk.is_full = True
        self._world.after(self._rng.uniform(1.0, 10.0), self._make_room)

    def _make_room(self) -> None:
        self._world.disk.is_full = False

    def _pause(self, slots: Sequence[Slot]) -> None:
        longest_s = self._world.scenario.lease_timeout_s * 7 / 3
        self._freeze(self._rng.choice(slots), self._rng.uniform(0.5, longest_s))

    def _cut(self, slots: Sequence[Slot]) -> None:
        process = self._rng.choice(slots).process
        if process is not None:
            seconds = self._rng.uniform(1, 2 * self._world.scenario.lease_timeout_s)
            self._world.history.hurt(process.name)
            self._world.network.cut[process] = self._world.loop.time() + seconds

    def _freeze(self, slot: object, seconds: float) -> None:
        process = getattr(slot, "process", None)
        if process is not None and process.is_alive and not process.is_stopped:
            self._world.history.hurt(process.name)
            self._world.loop.stop_process(process)
            self._world.after(seconds, self._thaw, process)

    def _thaw(self, process: object) -> None:
        if getattr(process, "is_stopped", False):
            self._world.loop.continue_process(process)  # type: ignore[arg-type]

    def _back(self) -> None:
        self._world.server.is_away = False
