"""Actors of a run under fault injection: identified by their heartbeats in the store."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from buffer import operations
from buffer.store import Store
from configs.errors import StoreError
from console.run.process import PYTHON, Command, Process
from console.run.process_guard import ProcessGuard
from console.run.run_folder import RunFolder

POLL_S = 0.05


@dataclass(slots=True)
class Actor:
    """One actor process and its incarnation, once the store has a heartbeat of it."""

    process: Process
    started_at: float
    incarnation: str | None = None
    serving_at: float | None = None
    """When it first held a lease, on our clock."""
    flags: tuple[str, ...] = field(default=())

    @property
    def pid(self) -> int:
        """Process id."""
        assert self.process.pid is not None
        return self.process.pid


class Fleet:
    """Starts, names, replaces and ends actors."""

    def __init__(
        self,
        folder: RunFolder,
        store: Store,
        guard: ProcessGuard,
        environment: Mapping[str, str],
        *,
        stop_timeout_s: float,
    ) -> None:
        self._environment = environment
        self._stop_timeout_s = stop_timeout_s
        self._folder = folder
        self._store = store
        self._guard = guard
        self._started = 0
        self.actors: list[Actor] = []
        self.gone: list[Actor] = []

    def add(self, *overrides: str, prefix: Sequence[str] = ()) -> Actor:
        """Start one more.

        Args:
            overrides: Settings of its own, such as another broker.endpoint.
            prefix: A command to run it under, such as `ip netns exec`.
        """
        self._started += 1
        name = f"chaos-{self._started}"
        flags = tuple(text for override in overrides for text in ("--set", override))
        command = Command(
            name,
            "actor",
            (
                *prefix,
                *(*PYTHON, "actors", "--config", str(self._folder.config)),
                *("--name", name),
                *flags,
            ),
            self._folder.log(name),
            self._environment,
        )
        process = Process(command, self._guard)
        process.start()
        actor = Actor(process, time.monotonic(), flags=overrides)
        self.actors.append(actor)
        return actor

    def refill(self) -> None:
        """Replace actors that have ended; those with settings of their own are not replaced."""
        for actor in [actor for actor in self.actors if actor.process.poll() is not None]:
            self.actors.remove(actor)
            self.gone.append(actor)
            if not actor.flags:
                self.add()

    def remove(self, actor: Actor) -> None:
        """End an actor for good."""
        actor.process.kill()
        if actor in self.actors:
            self.actors.remove(actor)
            self.gone.append(actor)

    def all_serve(self) -> bool:
        """True once every actor holds, or has held, a lease."""
        self.refill()
        self._name()
        return all(actor.serving_at is not None for actor in self.actors)

    def _name(self) -> None:
        """Match processes with incarnations; do nothing while the store is away."""
        if all(actor.serving_at is not None for actor in self.actors):
            return
        try:
            seen = self._store.run(operations.actors())
            holders = {task.incarnation for task in self._store.run(operations.inspect()).values()}
        except StoreError:
            return
        names = {int(actor.fields["pid"]): actor.incarnation for actor in seen}
        for actor in self.actors:
            actor.incarnation = actor.incarnation or names.get(actor.pid)
            if actor.serving_at is None and actor.incarnation in holders:
                actor.serving_at = time.monotonic()

    def close(self) -> None:
        """Ask all to drain, then kill the rest."""
        for actor in self.actors:
            actor.process.ask_to_stop()
        deadline = time.monotonic() + self._stop_timeout_s
        while time.monotonic() < deadline and any(
            actor.process.poll() is None for actor in self.actors
        ):
            time.sleep(POLL_S)
        for actor in self.actors:
            actor.process.kill()
