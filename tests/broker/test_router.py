"""The broker's socket on an event loop: nothing that arrives waits for the next message."""

import asyncio

import pytest
import zmq

from broker.transport.sockets import Router
from tests.waiting import until

PATIENCE_S = 5.0


@pytest.fixture
def ends():
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.linger = 0
        endpoint = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"
        with context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.connect(endpoint)
            yield router, dealer, endpoint


async def next_payload(router):
    async with asyncio.timeout(PATIENCE_S):
        route, frame = await router.receive()
        return route.bytes, frame.bytes


async def answer_all(router, count):
    """Answer from tasks of their own, so that sends come while the reader waits."""

    async def answer(route, payload):
        await asyncio.sleep(0.001 * (payload[0] % 3))
        router.send(route, payload)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(count):
            tasks.create_task(answer(*await next_payload(router)))


def converse(dealer, count):
    """Keep a few messages under way; returns the answers."""
    answers: list[bytes] = []
    for number in range(count):
        dealer.send(bytes([number % 256]))
        while number - len(answers) > 5:
            assert dealer.poll(1000 * PATIENCE_S), f"answer {len(answers)} never came"
            answers.append(dealer.recv())
    while len(answers) < count:
        assert dealer.poll(1000 * PATIENCE_S), f"answer {len(answers)} never came"
        answers.append(dealer.recv())
    return answers


def test_every_message_is_read_and_answered_while_others_are(ends):
    async def serve():
        talk = asyncio.to_thread(converse, ends[1], 1000)
        _, answers = await asyncio.gather(answer_all(Router(ends[0]), 1000), talk)
        return answers

    answers = asyncio.run(serve())

    assert sorted(answers) == sorted(bytes([number % 256]) for number in range(1000))


def test_a_waiting_reader_hears_what_comes_after_the_socket_was_bound_anew(ends):
    socket, dealer, endpoint = ends

    async def serve():
        router = Router(socket)
        reading = asyncio.create_task(next_payload(router))
        await asyncio.sleep(0.05)
        socket.unbind(endpoint)
        await until(lambda: socket.bind(endpoint) or True, ignoring=zmq.ZMQError)
        router.wake_reader()

        def has_heard() -> bool:  # the first go into the connection that was cut
            dealer.send(b"again")
            return reading.done()

        await until(has_heard, every_s=0.05)
        return (await reading)[1]

    assert asyncio.run(serve()) == b"again"


def test_who_is_gone_cannot_be_answered_and_a_cancelled_reader_leaves_nothing_behind(ends):
    socket, dealer, _ = ends

    async def serve():
        router = Router(socket)
        with pytest.raises(zmq.ZMQError) as error:
            router.send(b"nobody", b"hello")
        reading = asyncio.create_task(router.receive())
        await asyncio.sleep(0.05)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        dealer.send(b"later")
        return error.value.errno, (await next_payload(router))[1]

    assert asyncio.run(serve()) == (zmq.EHOSTUNREACH, b"later")
