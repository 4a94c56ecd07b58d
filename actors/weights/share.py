"""An actor's own port, at which other actors pull the weights that it has.

    JOIN(share) ─▶ publisher ─▶ ANNOUNCE(sources) ─▶ another actor ─PULL─▶ here

A slice that is still on its way is answered by LATER and sent when it has arrived, so that a
version runs down a whole tree of actors while it is being received. Access is granted as at the
publisher: to the keys in `allowed/`, of which this machine must have a copy. In a site, access is
granted to the keys that the publisher names (NEIGHBOURS), and to no key before that.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import zmq.asyncio

from broker.protocol.weight_messages import (
    CHUNK_BYTES,
    Neighbours,
    PeerEndpoint,
    Pull,
    SlicePending,
)
from broker.transport.allow_list import AllowList, Role, read_allowed
from broker.transport.keys import ALLOWED
from broker.transport.sockets import bound_endpoint, reachable
from broker.transport.zap import ZapAuthenticator
from broker.weights.port import Route, WeightPort, open_router
from configs.errors import RecordError, SettingsError

from .held import HeldWeights
from .links import ActorIdentity

MAX_WAITING = 256
"""Pulls that wait for a slice: far more than the publisher sends here. Beyond it, a new pull
replaces the oldest of the key that has most; its actor asks again."""
REFRESH_S = 1.0
"""Pause between two looks at the allow-list."""


class WeightShare:
    """Answers other actors until cancelled.

    Args:
        held: Versions to share.
        endpoint: Address to listen on.
        folder: Keys of the run, with `allowed/`; None = the keys of a site (`admit`).
        caller: Identity of this actor.
    """

    def __init__(
        self, held: HeldWeights, endpoint: str, *, folder: Path | None, caller: ActorIdentity
    ) -> None:
        self._held = held
        self._endpoint = endpoint
        self._folder = folder
        self._allowed = AllowList(folder)
        self._caller = caller
        self._port: WeightPort | None = None
        self._waiting: dict[str, dict[tuple[Route, Pull], None]] = {}
        """Waiting pulls by key, oldest first."""
        self.peer: PeerEndpoint | None = None
        """Address at which other actors reach it; None = not listening yet."""

    async def run(self) -> None:
        """Listen for other actors and answer their pulls until cancelled.

        Raises:
            SettingsError: The endpoint cannot be listened on, or no actor is allowed in.
        """
        if self._folder is not None:
            _require_actors(self._folder)
        context = zmq.asyncio.Context()
        door = open_router(context, self._endpoint, allowed=self._allowed, keys=self._caller.keys)
        try:
            with door as (router, authenticator):
                self._port = WeightPort(
                    router,
                    run=self._caller.run,
                    on_message=self._on_pull,
                    allows=self._allows,
                )
                self.peer = PeerEndpoint(
                    reachable(bound_endpoint(router)), self._caller.keys.public.decode()
                )
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._port.read())
                    tasks.create_task(self._answer_waiting())
                    tasks.create_task(_refresh(authenticator))
        finally:
            self.peer = None
            context.destroy(linger=0)

    def admit(self, neighbours: Neighbours) -> None:
        """Answer these actors of the site and no others; does nothing where `folder` is set."""
        if self._folder is None:
            self._allowed.admit_actors(neighbours.keys)

    def _allows(self, key: str) -> bool:
        return self._allowed.role(key.encode()) is Role.ACTOR

    def _on_pull(self, route: Route, key: str, _actor: str, pull: object) -> None:
        if not isinstance(pull, Pull):
            raise RecordError(
                f"a message to a sharing actor must be a Pull, got {type(pull).__name__}"
            )
        if pull.offset < 0 or pull.offset % CHUNK_BYTES or not 0 < pull.num_bytes <= CHUNK_BYTES:
            raise RecordError(
                f"a pull must be of one slice of {CHUNK_BYTES} bytes, got {pull.num_bytes} at "
                f"{pull.offset}"
            )
        answer = self._held.answer(pull)
        if isinstance(answer, SlicePending):
            self._put_off(key, route, pull)
        self._post(route, answer)

    def _put_off(self, key: str, route: Route, pull: Pull) -> None:
        pulls = self._waiting.setdefault(key, {})
        is_full = sum(map(len, self._waiting.values())) >= MAX_WAITING
        if is_full and (route, pull) not in pulls:
            most = max(self._waiting.values(), key=len)
            del most[next(iter(most))]
        pulls[route, pull] = None

    async def _answer_waiting(self) -> None:
        while True:
            await self._held.changed.wait()
            self._held.changed.clear()
            for key, pulls in tuple(self._waiting.items()):
                if not self._allows(key):
                    pulls.clear()
                for route, pull in tuple(pulls):
                    answer = self._held.answer(pull)
                    if not isinstance(answer, SlicePending):
                        del pulls[route, pull]
                        self._post(route, answer)
                if not pulls:
                    del self._waiting[key]

    def _post(self, route: Route, answer: object) -> None:
        assert self._port is not None
        self._port.post(route, answer)


async def _refresh(authenticator: ZapAuthenticator) -> None:
    while True:
        authenticator.refresh()
        await asyncio.sleep(REFRESH_S)


def _require_actors(folder: Path) -> None:
    if any(member.role is Role.ACTOR for member in read_allowed(folder).values()):
        return
    raise SettingsError(
        f"{folder / ALLOWED} must hold the public keys of the actors that may pull from this one, "
        "got none; copy the folder from the learner's machine, or leave actors.share_endpoint null"
    )
