"""The order of messages in an epoch, with a scripted group.

Why a fake group suffices here: real ones are in test_plane.py, but cannot be made to be slow or to
fail at a given message.
"""

import asyncio
import threading
from types import SimpleNamespace

import pytest

from broker.protocol.weight_messages import Abort, Ack, Epoch, Ready, Send, WeightGroupFault
from buffer.record.episode import PolicyVersion
from learner.weights import group as weight_group
from learner.weights.broadcast import Broadcast, BroadcastSettings
from learner.weights.epochs import READY_SHARE, EpochPhase, WeightEpochs
from learner.weights.updates import BroadcastPayload
from tests.waiting import still_waits

VERSION = PolicyVersion(1, 1)
DIGEST = "right"
JOIN_S, SEND_S = 0.5, 0.3


class FakeGroup:
    """Sends nothing, when `may_send` lets it."""

    may_send = threading.Event()
    is_broken = False

    def __init__(self, plan, listener) -> None:
        listener.close()

    def send(self, memory, *, bucket_bytes, send_s) -> None:
        self.may_send.wait(send_s)
        if self.is_broken:
            raise RuntimeError("connection closed by peer")

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass


class Story:
    """A broadcast to actors a and b, and everything that it said to them."""

    def __init__(self, send_s: float = SEND_S) -> None:
        self.said: list[tuple[str, object]] = []
        self.news = asyncio.Event()
        clock = asyncio.get_running_loop().time
        self.epochs = WeightEpochs(join_s=JOIN_S, send_s=send_s, clock=clock)
        self.broadcast = Broadcast(
            BroadcastSettings("127.0.0.1", JOIN_S, send_s, use_cuda=False),
            self.epochs,
            post=self.post,
            form_for=lambda slot, _ready: BroadcastPayload(slot.memory),
        )
        for actor in ("a", "b"):
            self.epochs.on_join(actor, can_group=True)

    def post(self, actor, message) -> None:
        self.said.append((actor, message))
        self.news.set()

    async def told(self, actor, kind):
        """Wait for the next message of this kind to this actor and take it away."""
        async with asyncio.timeout(5.0):
            while True:
                for line in self.said:
                    if line[0] == actor and type(line[1]) is kind:
                        self.said.remove(line)
                        return line[1]
                self.news.clear()
                await self.news.wait()

    def begin(self):
        self.broadcast._has_torch = True
        slot = SimpleNamespace(manifest=SimpleNamespace(digest=DIGEST, num_bytes=0), memory=b"")
        membership = self.broadcast.freeze_members(VERSION)
        assert membership is not None
        return asyncio.create_task(self.broadcast.run(slot, membership))  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def group(monkeypatch):
    monkeypatch.setattr(weight_group, "SendingGroup", FakeGroup)
    monkeypatch.setattr(FakeGroup, "may_send", threading.Event())
    FakeGroup.may_send.set()
    return FakeGroup


def test_everybody_is_ready_before_anybody_enters_the_group():
    async def story():
        plane = Story()
        running = plane.begin()
        invitations = [await plane.told(actor, Epoch) for actor in ("a", "b")]
        assert [i.rank for i in invitations] == [1, 2]
        assert {i.size for i in invitations} == {3}

        plane.broadcast.on_answer("a", Ready(1, VERSION))
        assert await still_waits(running, 0.02)
        assert not plane.said
        plane.broadcast.on_answer("b", Ready(1, VERSION))
        for actor in ("a", "b"):
            assert await plane.told(actor, Send) == Send(1, VERSION)
            plane.broadcast.on_answer(actor, Ack(1, VERSION, DIGEST))

        assert await running is True

    asyncio.run(story())


def test_who_is_not_ready_is_sent_to_pull_and_the_others_go_on_without_it():
    async def story():
        plane = Story()
        running = plane.begin()
        await plane.told("a", Epoch)
        plane.broadcast.on_answer("a", Ready(1, VERSION))

        assert (await plane.told("b", Abort)).epoch == 1
        again = await plane.told("a", Epoch)
        assert (again.number, again.size, again.fresh) == (2, 2, True)
        plane.broadcast.on_answer("a", Ready(2, VERSION))
        await plane.told("a", Send)
        plane.broadcast.on_answer("a", Ack(2, VERSION, DIGEST))

        assert await running is False
        assert plane.epochs.phase is EpochPhase.DONE
        assert not [line for line in plane.said if line[0] == "a"]

    asyncio.run(story())


@pytest.mark.parametrize(
    "answer",
    [Ack(1, VERSION, "wrong"), WeightGroupFault(1, VERSION, "cannot"), None],
    ids=["digest", "fault", "-"],
)
def test_a_failure_of_one_member_sends_all_to_pull(answer):
    async def story():
        plane = Story()
        running = plane.begin()
        for actor in ("a", "b"):
            plane.broadcast.on_answer(actor, Ready(1, VERSION))
        await plane.told("b", Send)
        plane.broadcast.on_answer("a", Ack(1, VERSION, DIGEST))
        if answer is not None:  # else b is silent until the deadline
            plane.broadcast.on_answer("b", answer)

        assert await running is False
        for actor in ("a", "b"):
            assert (await plane.told(actor, Abort)).version == VERSION

    asyncio.run(story())


def test_a_group_that_fails_here_sends_all_to_pull_at_once(group, monkeypatch):
    monkeypatch.setattr(group, "is_broken", True)

    async def story():
        plane = Story(send_s=60.0)
        running = plane.begin()
        for actor in ("a", "b"):
            plane.broadcast.on_answer(actor, Ready(1, VERSION))

        assert await asyncio.wait_for(running, 10.0) is False  # long before the deadline
        await plane.told("a", Abort)

    asyncio.run(story())


def test_answers_about_another_version_count_for_nothing():
    async def story():
        plane = Story()
        running = plane.begin()
        for actor in ("a", "b"):
            plane.broadcast.on_answer(actor, Ready(1, PolicyVersion(1, 0)))

        assert await still_waits(running, JOIN_S * READY_SHARE / 2)
        assert plane.epochs.phase is EpochPhase.FORMING
        assert await running is False

    asyncio.run(story())


def test_without_a_free_port_all_pull_and_nobody_is_invited(monkeypatch):
    def listen(host, ports):
        raise OSError("learner.broadcast_ports must have a free port")

    monkeypatch.setattr(weight_group, "listen", listen)

    async def story():
        plane = Story()
        assert await plane.begin() is False
        assert {type(message) for _, message in plane.said} == {Abort}
        assert {actor for actor, _ in plane.said} == {"a", "b"}

    asyncio.run(story())
