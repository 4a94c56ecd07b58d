"""A slice that takes longer to cross a link than heartbeats go unanswered elsewhere."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import zmq.asyncio

from actors.weights.links import ActorIdentity, WeightLink
from broker.protocol.weight_messages import CHUNK_BYTES, PeerEndpoint, Pull, WeightChunk
from broker.transport.keys import load_pair, make_client, make_keys
from broker.transport.sockets import HEARTBEAT_TIMEOUT_MS, bound_endpoint
from broker.weights.port import Route, WeightPort, open_router
from buffer.record.episode import PolicyVersion
from tests.waiting import until

RUN = "slow"
VERSION = PolicyVersion(1, 2)
SLICE_S = 1.5 * HEARTBEAT_TIMEOUT_MS / 1e3
PIECE = 16 * 1024


class SlowLink:
    """A proxy that lets so many bytes a second through to whoever connects."""

    def __init__(self, port: int, bytes_per_s: float) -> None:
        self._port = port
        self._piece_s = PIECE / bytes_per_s
        self.connections = 0
        self.cut = 0

    async def meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        there, back = await asyncio.open_connection("127.0.0.1", self._port, limit=PIECE)
        try:
            async with asyncio.TaskGroup() as ways:
                ways.create_task(self._carry(reader, back, 0.0))
                ways.create_task(self._carry(there, writer, self._piece_s))
        except* OSError:
            pass  # an end was cut
        finally:
            back.close()
            writer.close()
            self.cut += 1

    async def _carry(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, piece_s: float
    ) -> None:
        while piece := await source.read(PIECE):
            await asyncio.sleep(piece_s * len(piece) / PIECE)
            target.write(piece)
            await target.drain()
        raise ConnectionResetError


@pytest.mark.slow
def test_a_slice_that_crosses_for_longer_than_a_heartbeat_waits_arrives(tmp_path: Path) -> None:
    make_keys(tmp_path)
    make_client(tmp_path, "actor-0")

    found, connections = asyncio.run(pulled(tmp_path, bytes(CHUNK_BYTES)))

    assert found.payload == bytes(CHUNK_BYTES)
    assert connections == 1


async def pulled(keys: Path, payload: bytes) -> tuple[WeightChunk, int]:
    """Pull a slice over a slow link; returns it, and how often the link was connected."""
    inbox: asyncio.Queue[Any] = asyncio.Queue()
    learner, actor = (load_pair(keys, name) for name in ("learner", "actor-0"))
    with (
        zmq.asyncio.Context() as context,
        open_router(context, "tcp://127.0.0.1:*", allowed=keys, keys=learner) as (router, _),
    ):

        def answer(route: Route, *_: object) -> None:
            port.post(route, WeightChunk(VERSION, 0, payload, None))

        port = WeightPort(router, run=RUN, on_message=answer)
        number = int(bound_endpoint(router).rpartition(":")[2])
        slow = SlowLink(number, len(payload) / SLICE_S)
        proxy = await asyncio.start_server(slow.meet, "127.0.0.1", 0, limit=PIECE)
        endpoint = f"tcp://127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
        link = WeightLink(
            context,
            PeerEndpoint(endpoint, learner.public.decode()),
            caller=ActorIdentity(actor, RUN, "actor-0"),
            on_message=inbox.put_nowait,
            may_queue=True,
        )
        reading = [asyncio.create_task(each.read()) for each in (port, link)]
        try:
            assert link.post(Pull(VERSION, 0, len(payload), None))
            return await asyncio.wait_for(inbox.get(), 4 * SLICE_S), slow.connections
        finally:
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)
            link.close()
            proxy.close()
            await until(lambda: slow.cut == slow.connections)
