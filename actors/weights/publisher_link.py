"""The one connection of an actor to the weight publisher, which may move or restart at any time.

Says JOIN every two seconds; hands every message on. Sends never wait and may be lost: whoever needs
an answer asks again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq.asyncio

from broker.protocol.messages import Publication
from broker.protocol.weight_messages import JOIN_EVERY_S, Join, Peer

from .links import Caller, WeightLink

UNSENT_WAIT_S = 0.05
"""Pause while there is no connection: the first JOIN should follow it at once."""


class PublisherLink:
    """Connects to where the newest publication points.

    Args:
        caller: As whom.
        join: Makes the JOIN of this moment.
        take: Receives each message.
    """

    def __init__(
        self,
        *,
        caller: Caller,
        join: Callable[[], Join],
        take: Callable[[object], None],
    ) -> None:
        self._caller = caller
        self._join = join
        self._take = take
        self._place: Peer | None = None
        self._moved = asyncio.Event()
        self._link: WeightLink | None = None

    def follow(self, publication: Publication) -> None:
        """Connect there, if it is another place than the present one."""
        place = Peer(publication.endpoint, publication.public_key)
        if place != self._place:
            self._place = place
            self._moved.set()

    def post(self, message: object) -> bool:
        """Send if there is a connection that takes it."""
        return self._link is not None and self._link.post(message)

    async def run(self) -> None:
        """Stay connected until cancelled."""
        context = zmq.asyncio.Context()
        try:
            await self._moved.wait()
            while self._place is not None:
                place = self._place
                self._moved.clear()
                self._link = WeightLink(context, place, caller=self._caller, take=self._take)
                await self._serve(self._link)
        finally:
            self._link = None
            context.destroy(linger=0)

    async def _serve(self, link: WeightLink) -> None:
        """Read and say JOIN until the publisher has moved."""
        async with asyncio.TaskGroup() as tasks:
            working = [tasks.create_task(link.read()), tasks.create_task(self._say_join())]
            await self._moved.wait()
            for task in working:
                task.cancel()
        link.close()

    async def _say_join(self) -> None:
        while True:
            is_sent = self.post(self._join())
            await asyncio.sleep(JOIN_EVERY_S if is_sent else UNSENT_WAIT_S)
