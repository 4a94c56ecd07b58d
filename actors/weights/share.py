"""An actor's own port, at which other actors pull the weights that it has.

    JOIN(share) ─▶ publisher ─▶ ANNOUNCE(sources) ─▶ another actor ─PULL─▶ here

A slice that is still on its way is answered by LATER and sent when it has arrived, so that a
version runs down a whole tree of actors while it is being received. Who may ask is decided as at
the publisher: by the keys in `allowed/`, which this machine must have a copy of.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import zmq.asyncio

from broker.protocol.weight_messages import Later, Peer, Pull
from broker.transport.allow_list import AllowList, Role, read_allowed
from broker.transport.keys import ALLOWED, KeyPair
from broker.transport.sockets import bound_endpoint
from broker.weights.port import WeightPort, open_router, reachable
from configs.errors import RecordError, SettingsError

from .held import HeldWeights

MAX_WAITING = 256
"""Pulls that wait for a slice: far more than the publisher sends here; beyond, they ask again."""
REFRESH_S = 1.0
"""Pause between two looks at the allow-list."""


class WeightShare:
    """Answers other actors until cancelled.

    Args:
        held: What there is to share.
        endpoint: Where to listen.
        folder: Keys of the run, with `allowed/`.
        keys: This actor's key pair.
        run: Name of the run.
    """

    def __init__(
        self, held: HeldWeights, endpoint: str, *, folder: Path, keys: KeyPair, run: str
    ) -> None:
        self._held = held
        self._endpoint = endpoint
        self._folder = folder
        self._keys = keys
        self._run = run
        self._port: WeightPort | None = None
        self._waiting: dict[tuple[bytes, Pull], None] = {}
        self.peer: Peer | None = None
        """Where it listens, as others reach it; None = not yet."""

    async def run(self) -> None:
        """Listen and answer.

        Raises:
            SettingsError: the endpoint cannot be listened on, or nobody is allowed in.
        """
        _demand_actors(self._folder)
        context = zmq.asyncio.Context()
        door = open_router(context, self._endpoint, folder=self._folder, keys=self._keys)
        try:
            with door as (router, allowed):
                self._port = WeightPort(
                    router,
                    run=self._run,
                    take=self._asked,
                    allows=lambda key: allowed.role(key.encode()) is Role.ACTOR,
                )
                self.peer = Peer(reachable(bound_endpoint(router)), self._keys.public.decode())
                self._held.changed = self._answer_waiting
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._port.read())
                    tasks.create_task(_follow(allowed))
        finally:
            self.peer, self._held.changed = None, lambda: None
            context.destroy(linger=0)

    def _asked(self, route: bytes, _actor: str, pull: object) -> None:
        if not isinstance(pull, Pull):
            raise RecordError(f"an actor must be sent pulls alone, got {type(pull).__name__}")
        answer = self._held.answer(pull)
        if isinstance(answer, Later) and len(self._waiting) < MAX_WAITING:
            self._waiting[route, pull] = None
        self._post(route, answer)

    def _answer_waiting(self) -> None:
        for route, pull in tuple(self._waiting):
            answer = self._held.answer(pull)
            if not isinstance(answer, Later):
                del self._waiting[route, pull]
                self._post(route, answer)

    def _post(self, route: bytes, answer: object) -> None:
        assert self._port is not None
        self._port.post(route, answer)


async def _follow(allowed: AllowList) -> None:
    while True:
        allowed.refresh()  # a key may be taken off the list while its holder is connected
        await asyncio.sleep(REFRESH_S)


def _demand_actors(folder: Path) -> None:
    if any(member.role is Role.ACTOR for member in read_allowed(folder).values()):
        return
    raise SettingsError(
        f"{folder / ALLOWED} must hold the public keys of the actors that may pull from this one, "
        "got none; copy the folder from the learner's machine, or leave actors.share_endpoint null"
    )
