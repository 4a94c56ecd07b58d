"""The least that a broker between actors and Redis costs: decrypt, decode, write, acknowledge.

    python -m benchmarks.delivery.bare_broker FOLDER

Actors reach Redis only through an encrypted, authenticated connection (`docs/security.md`). This
process is such a door and nothing else: frames of 64 records, as an actor sends them, go into a
stream as they are. There is no lease, no fence, no validation, no deduplication. What it costs
beyond `streams_ack` is the price of the door, which no other broker can save; what Nyala costs
beyond it is the price of its guarantees.

FOLDER has `keys/` and `redis.url`; the endpoint is written to `broker.endpoint`.
"""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from pathlib import Path

import uvloop
import zmq

from benchmarks.delivery.sources import BARE_ENDPOINT, BARE_RUN, MOST_WAITING, PAUSE_S, QUEUE
from broker.protocol.codec import decode, encode
from broker.protocol.messages import SubmitRequest, TaskVerdict, Verdict, Verdicts
from broker.transport.keys import load_pair
from broker.transport.sockets import Router, bind_router, bound_endpoint
from broker.transport.zap import ZapAuthenticator
from buffer.client.address import connect_async
from buffer.client.connection import PipelinedConnection
from configs.durable import replace_file

MAX_MESSAGE_BYTES = 32 * 2**20


async def serve(folder: Path) -> None:
    """Forward records until the process is ended."""
    context = zmq.Context()
    connection = PipelinedConnection(connect_async((folder / "redis.url").read_text().strip()))
    with ZapAuthenticator(context, folder / "keys"):
        socket = bind_router(
            context,
            "tcp://127.0.0.1:*",
            keys=load_pair(folder / "keys", "broker"),
            max_message_bytes=MAX_MESSAGE_BYTES,
        )
        replace_file(folder / BARE_ENDPOINT, bound_endpoint(socket))
        router = Router(socket)
        async with asyncio.TaskGroup() as group:
            while True:
                route, frame = await router.receive()
                group.create_task(_forward(router, connection, route.bytes, frame.buffer))


async def _forward(
    router: Router, connection: PipelinedConnection, route: bytes, frame: memoryview
) -> None:
    """Write the records of one message, then acknowledge them; wait while the stream is long."""
    envelope = decode(frame, max_bytes=MAX_MESSAGE_BYTES)
    request = envelope.message
    assert isinstance(request, SubmitRequest)
    adds = [("XADD", QUEUE, "*", "record", line.record) for line in request.submissions]
    *_, waiting = await connection.execute_commands(*adds, ("XLEN", QUEUE))
    while waiting > MOST_WAITING:
        await asyncio.sleep(PAUSE_S)
        [waiting] = await connection.execute_commands(("XLEN", QUEUE))
    verdicts = tuple(TaskVerdict(line.task_id, Verdict.OK) for line in request.submissions)
    answer = partial(encode, run=BARE_RUN, incarnation="broker", seq=envelope.seq)
    router.send(route, answer(Verdicts(verdicts, None)))


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(Path(sys.argv[1])))
