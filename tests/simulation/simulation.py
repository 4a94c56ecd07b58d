"""One simulated run: actors, brokers, learner and store in virtual time, faults and checker.

    faults for a while -> calm until all has recovered -> a death in the calm -> the run ends

Everything is drawn from one seed; the trace hash names what happened.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from broker.transport.keys import make_keys
from buffer.record.episode import Episode
from configs import durable
from tests.actors.support.fake_engine import ALPHABET, CharacterTokenizer
from tests.simulation import broker as simulated_broker
from tests.simulation.actor import Actor, from_table
from tests.simulation.agents import (
    HOST,
    VOCABULARY,
    AgentLog,
    Host,
    Tasks,
    answer_to,
    tokenizer,
)
from tests.simulation.disk import FaultyDisk
from tests.simulation.event_loop import OUTSIDE, Process, VirtualLoop
from tests.simulation.history import LIAR, History
from tests.simulation.learner import Learner
from tests.simulation.liar import Liar
from tests.simulation.made_up import Talks, check_episode
from tests.simulation.memory_redis import Reply
from tests.simulation.nemesis import Nemesis
from tests.simulation.network import Network, Trace
from tests.simulation.scenario import Scenario
from tests.simulation.stand_in_time import EPOCH_S, stand_in
from tests.simulation.store import Server
from tests.simulation.teacher import SimulatedTeacher, check_scores

CALM_LIMIT_S = 600.0
END_LIMIT_S = 60.0
HEALED_S = 40.0  # the longest pause, and the grace after it, are over
RESTART_S = 2.0


@dataclass(eq=False)
class Slot:
    """A place where one process after the other lives."""

    name: str
    process: Process | None = None
    actor: Actor | None = None
    learner: Learner | None = None


@dataclass
class Result:
    """What happened in a simulation in which nothing was wrong."""

    trace_hash: str
    virtual_s: float
    figures: dict[str, Any] = field(default_factory=dict)


class Simulation:
    """A world of its own; `run` it once."""

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self.scenario = scenario
        self.loop = VirtualLoop()
        self.rng = random.Random(f"{scenario.seed}")
        self.trace = Trace(self.loop.time)
        self.network = Network(self.loop, self._generator("network"), self.trace)
        self.server = Server(
            self.loop,
            self._generator("store"),
            self.trace,
            clock=lambda: EPOCH_S + self.loop.time(),
            scripts=scenario.scripts,
        )
        self.settings = scenario.settings(folder)
        self.history = History("simulated", scenario.group_size, self.loop.time)
        self.server.watch = self._watch
        self.settings.run.folder.mkdir(parents=True)
        self.disk = FaultyDisk(self.settings.run.folder, self._generator("disk"))
        self.keys = make_keys(folder / "keys")
        self.actors = [Slot(f"actor-{i}") for i in range(scenario.actors)]
        self.brokers = [Slot(f"tcp://broker:{i + 1}") for i in range(scenario.brokers)]
        self.liars = [Slot(f"{LIAR}-{i}") for i in range(scenario.liars)]
        self.hosts = [Slot(f"{HOST}-{i}") for i in range(scenario.hosts)]
        self.teachers = [Slot(f"teacher-{i}") for i in range(scenario.teachers)]
        self.agents = AgentLog("simulated", self.history, self.loop.time)
        self.learner = Slot("learner")
        self.on_progress: Callable[[float], None] = lambda _now: None
        self._lives = itertools.count(1)
        self._is_ending = False

    def run(self) -> Result:
        """Play the whole story.

        Raises:
            AssertionError: An invariant does not hold.
        """
        asyncio.set_event_loop(self.loop)
        try:
            story = self.loop.create_task(self._story(), context=OUTSIDE.copy())
            checker = self.loop.create_task(self._check_regularly(), context=OUTSIDE.copy())
            ends = asyncio.wait({story, checker}, return_when=asyncio.FIRST_COMPLETED)
            self.loop.run_until_complete(ends)
            for task in (checker, story):
                if task.done():
                    task.result()
            self._raise_failures()
            return self._result()
        finally:
            self._bury_all()
            asyncio.set_event_loop(None)
            self.loop.close()

    def after(self, delay_s: float, action: Callable[..., object], *arguments: object) -> None:
        """Do something later, whatever becomes of the processes."""
        self.loop.call_later(delay_s, action, *arguments, context=OUTSIDE)

    def kill_actor(self, slot: Slot, *, vanished: bool) -> None:
        """Kill an actor; another one takes its place after a while."""
        if slot.process is None:
            return
        process, slot.process, slot.actor = slot.process, None, None
        kinds = {"actors": self.actors, "teachers": self.teachers, "liars": self.liars}
        self.history.note(f"deaths of {next(kind for kind in kinds if slot in kinds[kind])}")
        self.history.died(process.name, self.server.database)
        self.network.close_all(process, vanished=vanished)
        self.loop.kill(process)
        if slot in self.actors:
            self.after(self.rng.uniform(0.5, 2.0) * RESTART_S, self._start_actor, slot)
        elif slot in self.teachers:
            self.after(self.rng.uniform(0.5, 2.0) * RESTART_S, self._start_teacher, slot)

    def kill_host(self, slot: Slot, *, vanished: bool) -> None:
        """Kill a host with all its agents; another one takes its place after a while."""
        if slot.process is None:
            return
        process, slot.process = slot.process, None
        self.history.note("deaths of hosts")
        self.history.hurt(process.name)
        self.network.close_all(process, vanished=vanished)
        self.loop.kill(process)
        self.after(self.rng.uniform(0.5, 2.0) * RESTART_S, self._start_host, slot)

    def kill_broker(self, slot: Slot) -> None:
        """Kill a broker; it is started again soon."""
        if slot.process is None:
            return
        process, slot.process = slot.process, None
        self.history.note("deaths of brokers")
        self.network.unbind(slot.name)
        self.loop.kill(process)
        self.after(self.rng.uniform(0.2, 2.0) * RESTART_S, self._start_broker, slot)

    def kill_broker_at_grant(self) -> None:
        """Kill the next broker whose LEASE the store has carried out, before it hears of it."""

        def strike(broker: Process | None, fence: int) -> None:
            self.server.on_grant = lambda _broker, _fence: None
            self.history.lose_grant(fence)
            for slot in self.brokers:
                if slot.process is broker:
                    self.kill_broker(slot)

        self.server.on_grant = strike

    def kill_learner(self) -> None:
        """Kill the learner; its supervisor starts the next one."""
        if self.learner.process is None:
            return
        process, self.learner.process = self.learner.process, None
        self.history.note("deaths of the learner")
        self.loop.kill(process)
        self.after(self.rng.uniform(0.2, 2.0) * RESTART_S, self._start_learner)

    def replace_learner(self, *, wakes_after_s: float) -> None:
        """Stop the learner, start another, and let the first go on as if nothing had happened."""
        old = self.learner.process
        if old is None or old.is_stopped:
            return
        self.learner.process = None
        self.loop.stop_process(old)
        self.after(0.5, self._start_learner)
        self.after(wakes_after_s, self.loop.continue_process, old)

    def lose_power(self, *, after_operations: int) -> None:
        """Take the power from the learner's machine, now or in the middle of what it writes."""
        if after_operations:
            self.disk.loses_power_after = self.disk.operations + after_operations
        else:
            self.kill_learner()
            self.power_is_lost()

    def power_is_lost(self) -> None:
        """The learner's disk keeps what was synced, and of the rest what chance decides."""
        self.history.note("power losses")
        self.disk.loses_power_after = None
        self.disk.lose_power(worst=self.disk.rng.random() < 0.5)

    async def _story(self) -> None:
        for broker in self.brokers:
            self._start_broker(broker)
        self._start_learner()
        for actor in self.actors:
            self.after(self.rng.uniform(0, 3), self._start_actor, actor)
        for liar in self.liars:
            self.after(2.0, self._start_liar, liar)
        for host in self.hosts:
            self.after(1.0, self._start_host, host)
        for teacher in self.teachers:
            self.after(1.0, self._start_teacher, teacher)
        scenario, rng = self.scenario, self._generator("nemesis")
        nemesis = Nemesis(self, rng, scenario.rates, scenario.certain_faults)
        await nemesis.rage(self.scenario.faulty_s)
        for liar in self.liars:  # what others held is free by then
            self.after(scenario.lease_timeout_s, partial(self.kill_actor, liar, vanished=False))
        await self._recover()
        if scenario.is_lost_in_the_calm:
            await self._lose_one_in_the_calm()
        await self._end()

    async def _recover(self) -> None:
        """After the last fault the run goes on: batches are trained again (I15)."""
        self.history.forget_orphans()
        agents = self.agents.open_lives
        await self._until(
            lambda: all(agent.is_over for agent in agents),
            CALM_LIMIT_S,
            "ENDS: conversations go on",
        )
        goal = self.history.steps_in_all + self.scenario.calm_batches
        await self._until(
            lambda: self.history.steps_in_all >= goal, CALM_LIMIT_S, "the run stands still"
        )
        if self.scenario.loses_power_in_the_calm:
            lives = self.history.count["lives of the learner"]
            self.lose_power(after_operations=0)
            await self._until(
                lambda: self.history.count["lives of the learner"] > lives,
                CALM_LIMIT_S,
                "no learner after a power loss",
            )

    async def _lose_one_in_the_calm(self) -> None:
        """A dead actor's tasks are another's within ttl + tick + 1 s (I15)."""
        self.history.forget_orphans()
        await asyncio.sleep(HEALED_S)
        self.history.count["reaped before the calm"] = self.history.count["reaped"]
        self.history.forget_orphans()
        for slot in self.actors:
            self.kill_actor(slot, vanished=True)
            if self.history.orphans:
                break
        settings = self.settings.broker
        limit_s = settings.lease_timeout_s + 1.2 * settings.reap_every_s + 1.0
        await self._until(
            lambda: not self.history.orphans_left(self.server.database),
            limit_s,
            "a dead actor's tasks are nobody's",
        )

    async def _end(self) -> None:
        """The learner ends the run and everybody goes home."""
        self._is_ending = self.agents.is_ending = True
        learner = self.learner.learner
        assert learner is not None
        learner.is_ending = True
        await self._until(lambda: self.history.result is not None, END_LIMIT_S, "no end")
        workers = (*self.actors, *self.hosts, *self.teachers)
        await self._until(
            lambda: all(slot.process is None for slot in workers),
            END_LIMIT_S,
            "actors or hosts stay",
        )
        self.history.check_end(self.server.database)

    def _watch(self, script: str, arguments: tuple[Any, ...], reply: Reply) -> None:
        self.history.watch(script, arguments, reply)
        if script == "say_replies":
            tasks = [int(line.split()[0]) for line in arguments[6].splitlines()]
            self.agents.check_replies(tasks, self.server.database)
        elif script == "fail" and self.hosts:
            self.agents.check_failures(arguments[3:])

    def _check_episode(self, episode: Episode) -> None:
        check_episode(episode, self.scenario.group_size)
        if self.teachers:
            check_scores(episode)

    async def _until(self, holds: Callable[[], bool], limit_s: float, what: str) -> None:
        ends_at = self.loop.time() + limit_s
        while not holds():
            self._raise_failures()
            assert self.loop.time() < ends_at, f"I15: {what} after {limit_s:.1f} s"
            await asyncio.sleep(0.1)

    async def _check_regularly(self) -> None:
        while True:
            await asyncio.sleep(self.scenario.check_every_s)
            self._raise_failures()
            self.history.check(self.server.database)
            self.on_progress(self.loop.time())

    def _raise_failures(self) -> None:
        if self.loop.failures:
            raise self.loop.failures[0]

    def _start_actor(self, slot: Slot) -> None:
        if self._is_ending or slot.process is not None:
            return
        name = f"{slot.name}.{next(self._lives)}"
        self.history.note("lives of actors")

        async def live() -> None:
            endpoints = [broker.name for broker in self.brokers]
            rng = self._generator(name)
            slot.actor = Actor(
                name,
                self.settings,
                endpoints,
                rng,
                step_s=self.scenario.step_s,
                broken_off=self.scenario.broken_off,
                speeds=self.scenario.speeds,
                environment=Tasks if self.hosts else partial(Talks, self.scenario.poisoned),
                tokenizer=tokenizer() if self.hosts else CharacterTokenizer(),
                sample=answer_to if self.hosts else from_table,
                is_killed=lambda: not process.is_alive,
                on_ack=self.history.acknowledged,
                on_lease=self.history.received,
            )
            await slot.actor.live()

        process = slot.process = Process(name)
        self._start(slot, process, live(), lambda: self._start_actor(slot))

    def _start_teacher(self, slot: Slot) -> None:
        if self._is_ending or slot.process is not None:
            return
        name = f"{slot.name}.{next(self._lives)}"

        async def live() -> None:
            teacher = SimulatedTeacher(
                name,
                self.settings,
                [broker.name for broker in self.brokers],
                self._generator(name),
                is_killed=lambda: not process.is_alive,
                on_ack=self.history.acknowledged,
                on_lease=self.history.received,
            )
            await teacher.live()

        process = slot.process = Process(name)
        self._start(slot, process, live(), lambda: self._start_teacher(slot))

    def _start_liar(self, slot: Slot) -> None:
        name = f"{slot.name}.{next(self._lives)}"
        endpoints = [broker.name for broker in self.brokers]

        async def live() -> None:
            liar = Liar(
                name,
                self.settings,
                endpoints,
                self._generator(name),
                on_verdict=self.history.lied,
            )
            await liar.live()

        process = slot.process = Process(name)
        self._start(slot, process, live(), lambda: None)

    def _start_host(self, slot: Slot) -> None:
        if self._is_ending or slot.process is not None:
            return
        name = f"{slot.name}.{next(self._lives)}"

        async def live() -> None:
            endpoints = [broker.name for broker in self.brokers]
            host = Host(
                name,
                self.settings,
                endpoints,
                self._generator(name),
                self.agents,
                work_s=self.scenario.work_s,
            )
            await host.live()

        process = slot.process = Process(name)
        self._start(slot, process, live(), lambda: self._start_host(slot))

    def _start_broker(self, slot: Slot) -> None:
        process = slot.process = Process(slot.name)
        serving = simulated_broker.serve(
            self.settings,
            self.server,
            self.network,
            slot.name,
            self.keys,
        )
        self._start(slot, process, serving, lambda: self._start_broker(slot))

    def _start_learner(self) -> None:
        slot = self.learner
        if slot.process is not None:
            return
        name = f"learner.{next(self._lives)}"
        rng = self._generator(name)
        slot.learner = Learner(
            self.settings,
            self.server,
            self.history,
            rng,
            train_s=self.scenario.train_s,
            check=self.agents.check_episode if self.hosts else self._check_episode,
            vocabulary=VOCABULARY if self.hosts else len(ALPHABET),
            on_power_loss=self.power_is_lost,
        )
        process = slot.process = Process(name)
        self._start(slot, process, slot.learner.live(), self._start_learner)

    def _start(
        self,
        slot: Slot,
        process: Process,
        work: Coroutine[Any, Any, None],
        again: Callable[[], None],
    ) -> None:
        """Begin a life; a process that ends by itself is started again, unless the run is over."""
        task = self.loop.start(process, work)

        def ended(done: asyncio.Task[Any]) -> None:
            if process.is_alive and not done.cancelled() and done.exception() is not None:
                self.loop.failures.append(done.exception() or RuntimeError())
            if slot.process is process:
                slot.process = None
                if not self._is_ending:
                    self.after(RESTART_S, again)

        task.add_done_callback(ended, context=OUTSIDE.copy())

    def _bury_all(self) -> None:
        """Let no task outlive its world."""
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        workers = (*self.actors, *self.liars, *self.hosts, *self.teachers)
        for slot in (*workers, *self.brokers, self.learner):
            if slot.process is not None:
                self.loop.kill(slot.process)
        if tasks:
            self.loop.run_until_complete(asyncio.wait(tasks, timeout=END_LIMIT_S))

    def _generator(self, name: str) -> random.Random:
        return random.Random(f"{self.scenario.seed} {name}")

    def _result(self) -> Result:
        history, waits = self.history, sorted(self.history.reassigned_s)
        percent = statistics.quantiles(waits, n=100) if len(waits) > 1 else [0.0] * 99
        figures = {
            "events": self.trace.length,
            "store_calls": dict(self.server.calls.most_common()),
            "network": self.network.count,
            "counts": dict(sorted(history.count.items())),
            "checks": history.checks,
            "steps": history.step,
            "trained_tokens": history.tokens,
            "reassigned": len(waits),
            "reassigned_p50_s": round(percent[49], 2),
            "reassigned_p99_s": round(percent[98], 2),
        }
        return Result(self.trace.digest(), self.loop.time(), figures)


def simulate(
    scenario: Scenario, folder: Path, on_progress: Callable[[float], None] | None = None
) -> Result:
    """Run a scenario in a world of its own.

    Raises:
        AssertionError: An invariant does not hold.
    """
    simulation = Simulation(scenario, folder)
    if on_progress is not None:
        simulation.on_progress = on_progress
    with (
        stand_in(simulation.loop, simulation.network, scenario.seed),
        mock.patch.object(durable, "DISK", simulation.disk),
    ):
        return simulation.run()
