"""Choice of peers and trust in them: the tree, the versions an actor offers, and bad peers.

Peers are scripted here, because a real one cannot be made to stop at a given slice; real ones, with
their own ports, are in test_share.py.
"""

import asyncio
import mmap
import time
from contextlib import asynccontextmanager

import pytest
import zmq.asyncio

from actors.weights import share, slices
from actors.weights import slices as pace
from actors.weights import sources as weight_sources
from actors.weights.held import HeldWeights
from actors.weights.links import ActorIdentity
from actors.weights.share import WeightShare
from actors.weights.slices import SlicePull
from actors.weights.sources import PeerSource, WeightSources
from broker.protocol.manifest import chunk_digests
from broker.protocol.weight_messages import (
    PULL_CREDIT,
    PeerEndpoint,
    Pull,
    SlicePending,
    VersionGone,
    WeightChunk,
)
from broker.transport.keys import load_pair
from buffer.record.episode import PolicyVersion
from configs.errors import DeadlineError
from learner.weights.sites import FAN_OUT, PullTree
from tests.broker.support.keys import keys_with_actor
from tests.waiting import until
from tests.weights.support.scripted_publisher import CALLER, CHUNK_BYTES, NUM_BYTES, contents

VERSION = PolicyVersion(1, 1)
DIGESTS = chunk_digests(contents(1), CHUNK_BYTES)


@pytest.fixture(autouse=True)
def _small_chunks_and_little_patience(monkeypatch):
    monkeypatch.setattr(slices, "CHUNK_BYTES", CHUNK_BYTES)
    monkeypatch.setattr(slices, "FIRST_WAIT_S", 0.02)
    monkeypatch.setattr(slices, "SILENT_S", 0.06)
    monkeypatch.setattr(slices, "LATER_S", 0.2)


class ScriptedSource:
    """Answers at once: with the right slices, or what `answer` makes of one."""

    def __init__(self, name, *, kind="peers", answer=lambda chunk: chunk) -> None:
        self.name = name
        self.kind = kind
        self.answer = answer
        self.delay_s = 0.0
        self.asked: list[int] = []

    @asynccontextmanager
    async def open(self, on_answer):
        is_open = True

        def deliver(answer) -> None:
            if is_open:
                on_answer(answer)

        def post(pull) -> bool:
            self.asked.append(pull.offset)
            whole = contents(pull.version.step)
            payload = whole[pull.offset : pull.offset + pull.num_bytes]
            answer = self.answer(WeightChunk(pull.version, pull.offset, payload))
            if answer is not None:
                asyncio.get_running_loop().call_later(self.delay_s, deliver, answer)
            return True

        yield post
        is_open = False


def corrupt(chunk):
    return WeightChunk(
        chunk.version, chunk.offset, bytes([chunk.payload[0] ^ 1]) + chunk.payload[1:]
    )


def after(count, answer):
    """Answer rightly so often, and then as `answer` does."""
    left = [count]

    def switch(chunk):
        left[0] -= 1
        return chunk if left[0] >= 0 else answer(chunk)

    return switch


def pulled(*sources, timeout_s=1.0):
    """Pull from these; returns the bytes, the pull, and who was left with (has it lied)."""
    memory, left = mmap.mmap(-1, NUM_BYTES), {}

    async def pull():
        made = SlicePull(
            VERSION,
            memory,
            sources=sources,
            digests=DIGESTS,
            failed=lambda source, _reason, has_lied: left.update({source.name: has_lied}),
            progress_timeout_s=timeout_s,
        )
        assert await made.run() is None
        return made

    made = asyncio.run(pull())
    return memory[:], made, left


def publisher():
    return ScriptedSource("publisher", kind="publisher")


def test_a_peer_spares_the_publisher():
    last = publisher()

    got, pull, left = pulled(ScriptedSource("peer"), last)

    assert (got, left, last.asked) == (contents(1), {}, [])
    assert pull.num_bytes["peers"] == NUM_BYTES


@pytest.mark.parametrize(
    ("answer", "has_lied"), [(lambda _: None, False), (corrupt, True)], ids=["silent", "lying"]
)
def test_what_a_failing_peer_did_not_bring_comes_from_the_next_source(answer, has_lied):
    last = publisher()

    got, pull, left = pulled(ScriptedSource("peer", answer=after(3, answer)), last)

    assert got == contents(1)
    assert left == {"peer": has_lied}
    assert sorted(last.asked) == [i * CHUNK_BYTES for i in (3, 4, 5, 6)]
    assert pull.num_bytes == {"peers": 3 * CHUNK_BYTES, "publisher": NUM_BYTES - 3 * CHUNK_BYTES}


def test_a_peer_that_only_promises_is_left_and_one_that_keeps_its_word_is_not():
    promising = ScriptedSource("promising", answer=lambda c: SlicePending(c.version, c.offset))
    first_promises = iter(range(2 * PULL_CREDIT))
    late = ScriptedSource(
        "late",
        answer=lambda c: (
            c if next(first_promises, None) is None else SlicePending(c.version, c.offset)
        ),
    )
    last = publisher()

    got, _, left = pulled(promising, late, last)

    assert (got, left, last.asked) == (contents(1), {"promising": False}, [])


def test_a_peer_that_promises_again_and_again_is_left_as_soon_as_one_that_did_once():
    async def repeat(on_answer, later):
        while True:
            on_answer(later)
            await asyncio.sleep(0.005)

    class Promising(ScriptedSource):
        @asynccontextmanager
        async def open(self, on_answer):
            repeating = asyncio.create_task(repeat(on_answer, SlicePending(VERSION, 0)))
            yield lambda _: True
            repeating.cancel()

    got, _, left = pulled(Promising("promising"), publisher(), timeout_s=30.0)

    assert (got, left) == (contents(1), {"promising": False})


async def trickle(held: HeldWeights) -> None:
    """Have a slice each time before one that promised is no longer waited for."""
    for offset in range(0, NUM_BYTES, CHUNK_BYTES):
        await asyncio.sleep(slices.LATER_S / 4)
        held.arrived(offset)


def slow(slice_s: float, publisher_s: float, num_slices: int) -> tuple[int, int]:
    """Let a peer bring slices at this pace: how many before it is left, and how often measured."""
    now, measured = 0.0, 0
    made = pace.Pace(lambda: now)
    for brought in range(num_slices):
        if made.is_behind:
            made.begin_measurement(0)
            now, measured = now + publisher_s, measured + 1
            made.measure()
            if made.is_behind:
                return brought, measured
        now += slice_s
        made.brought()
    return num_slices, measured


def test_a_peer_may_take_twice_as_long_as_the_publisher_and_ten_seconds_more():
    assert slow(9.0, 0.1, 1000) == (2, 1)
    assert slow(3.0, 0.1, 1000) == (6, 1)
    assert slow(3.0, 1.4, 1000)[0] < 1000
    # The peer's own link to the publisher: this one's, too.
    assert slow(9.0, 9.0, 1000) == (1000, 1)
    assert slow(3.0, 1.6, 1000) == (1000, 1)
    assert slow(0.9, 0.1, 1000) == (1000, 0)


@pytest.mark.slow
@pytest.mark.parametrize("is_link_slow", [False, True])
def test_a_peer_that_trickles_is_left_unless_the_publisher_is_as_slow(
    tmp_path, monkeypatch, is_link_slow
):
    monkeypatch.setattr(share, "CHUNK_BYTES", CHUNK_BYTES)
    monkeypatch.setattr(slices, "LATER_S", 2.0)
    monkeypatch.setattr(pace, "SLACK_S", 0.6)
    monkeypatch.setattr(pace, "SLICE_S", 0.05)
    keys = keys_with_actor(tmp_path / "keys")
    caller = ActorIdentity(load_pair(keys, "actor"), "toy", "trickling")
    last = publisher()
    last.delay_s = 0.6 if is_link_slow else 0.0

    async def pull():
        context, held, left = zmq.asyncio.Context(), HeldWeights(), []
        trickling = WeightShare(held, "tcp://127.0.0.1:0", folder=keys, caller=caller)
        memory = mmap.mmap(-1, NUM_BYTES)
        held.begin_version(VERSION, memory_of(1))
        running = asyncio.create_task(trickling.run())
        peer = await until(lambda: trickling.peer)
        arriving = asyncio.create_task(trickle(held))
        made = SlicePull(
            VERSION,
            memory,
            sources=[PeerSource(peer, context, caller), last],
            digests=DIGESTS,
            failed=lambda _source, reason, _has_lied: left.append(reason),
            progress_timeout_s=10.0,
        )
        assert await made.run() is None
        for task in (running, arriving):
            task.cancel()
        await asyncio.wait([running, arriving])
        context.destroy(linger=0)
        return memory[:], made.num_bytes, left

    got, num_bytes, left = asyncio.run(pull())
    assert got == contents(1)
    if is_link_slow:
        assert left == []
        assert len(last.asked) == 1  # to measure
    else:
        assert left == ["it is less than half as fast as the publisher"]
        assert num_bytes["publisher"] >= NUM_BYTES - 4 * CHUNK_BYTES


def test_a_silent_peer_is_waited_for_no_longer_because_the_publisher_has_moved_on(monkeypatch):
    monkeypatch.setattr(slices, "SILENT_S", 0.3)
    monkeypatch.setattr(pace, "SLACK_S", 0.05)
    last, first = publisher(), iter([True])
    last.answer = lambda chunk: (
        VersionGone(chunk.version, chunk.offset) if next(first, False) else chunk
    )
    began = time.monotonic()

    got, _, left = pulled(ScriptedSource("silent", answer=lambda _: None), last, timeout_s=60.0)

    assert (got, left) == (contents(1), {"silent": False})
    assert time.monotonic() - began < 30


def test_an_answer_to_another_question_measures_nothing():
    made = pace.Pace(lambda: 0.0)
    made.begin_measurement(3 * CHUNK_BYTES)

    assert made.is_asked_for(3 * CHUNK_BYTES)
    assert not made.is_asked_for(0)


@pytest.mark.parametrize(
    "peer", [PeerEndpoint("garbage", "k" * 40), PeerEndpoint("tcp://127.0.0.1:1", "short")]
)
def test_a_peer_with_an_address_that_is_none_makes_way_for_the_next(peer):
    async def pull():
        context = zmq.asyncio.Context()
        last, memory = publisher(), mmap.mmap(-1, NUM_BYTES)
        sources = [PeerSource(peer, context, CALLER), last]
        made = SlicePull(VERSION, memory, sources=sources, digests=DIGESTS, progress_timeout_s=1.0)
        try:
            assert await made.run() is None
        finally:
            context.destroy(linger=0)
        return memory[:]

    assert asyncio.run(pull()) == contents(1)


def test_a_peer_that_has_moved_on_is_left_without_a_grudge():
    moved = ScriptedSource("moved", answer=after(2, lambda c: VersionGone(c.version, c.offset)))

    got, pull, left = pulled(moved, publisher())

    assert (got, left) == (contents(1), {})
    assert pull.num_bytes["peers"] == 2 * CHUNK_BYTES


def test_a_pull_ends_when_its_last_source_is_silent_too():
    silent = [ScriptedSource(name, answer=lambda _: None) for name in "ab"]

    with pytest.raises(
        DeadlineError, match=r"must make progress within 0\.1 s, got nothing more of"
    ):
        pulled(*silent, timeout_s=0.1)


def test_who_was_silent_rests_and_who_lied_is_never_asked_again(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("actors.weights.sources.time.monotonic", lambda: now[0])
    peers = tuple(PeerEndpoint(f"tcp://127.0.0.1:{port}", "k") for port in (1, 2, 3))
    sources = WeightSources(lambda _: True, order=("peers", "publisher"), caller=CALLER)
    silent, liar, _, _ = sources.choose_sources(peers)
    assert isinstance(silent, PeerSource)

    sources.failed(silent, "silent", False)
    sources.failed(liar, "lied", True)

    def names():
        return [source.name for source in sources.choose_sources(peers)]

    assert names() == [peers[2].endpoint, "publisher"]
    now[0] = 2 * weight_sources.REST_S
    assert names() == [peers[0].endpoint, peers[2].endpoint, "publisher"]
    assert [s.name for s in sources.choose_sources()] == ["publisher"]
    sources.close()


def memory_of(step: int) -> mmap.mmap:
    memory = mmap.mmap(-1, NUM_BYTES)
    memory[:] = contents(step)
    return memory


def asked(step: int, offset: int = 0, base: PolicyVersion | None = None) -> Pull:
    return Pull(PolicyVersion(1, step), offset, CHUNK_BYTES, base)


def test_an_actor_offers_its_newest_version_and_what_has_arrived_of_the_next():
    held = HeldWeights()
    assert isinstance(held.answer(asked(1)), SlicePending)

    held.hold(PolicyVersion(1, 1), memory_of(1))
    assert held.changed.is_set()
    held.changed.clear()
    held.begin_version(PolicyVersion(1, 2), memory_of(2))
    assert not held.changed.is_set()
    held.arrived(CHUNK_BYTES)
    assert held.changed.is_set()

    assert held.answer(asked(1)) == WeightChunk(PolicyVersion(1, 1), 0, contents(1)[:CHUNK_BYTES])
    assert isinstance(held.answer(asked(2)), SlicePending)
    assert isinstance(held.answer(asked(2, CHUNK_BYTES)), WeightChunk)
    assert isinstance(held.answer(asked(3)), SlicePending)
    assert isinstance(held.answer(asked(0)), VersionGone)


def test_an_actor_offers_nothing_that_it_has_taken_back_nor_what_is_not_there():
    held = HeldWeights()
    held.hold(PolicyVersion(1, 1), memory_of(1))

    assert isinstance(held.answer(asked(1, NUM_BYTES)), VersionGone)
    assert isinstance(held.answer(asked(1, -1)), VersionGone)
    assert isinstance(held.answer(asked(1, base=PolicyVersion(1, 0))), VersionGone)
    held.begin_version(PolicyVersion(1, 2), memory_of(2))
    held.arrived(0)
    held.abandon()
    held.release()
    assert isinstance(held.answer(asked(1)), SlicePending)
    assert isinstance(held.answer(asked(2)), SlicePending)


def test_nobody_waits_for_what_lies_beyond_the_end_of_what_is_arriving():
    held = HeldWeights()
    held.begin_version(PolicyVersion(1, 2), memory_of(2))

    assert isinstance(held.answer(asked(2, 0)), SlicePending)
    assert isinstance(held.answer(asked(2, NUM_BYTES)), VersionGone)


def grown(num_sharing: int, num_others: int = 0) -> tuple[PullTree, dict[str, PeerEndpoint]]:
    tree = PullTree()
    peers = {f"s{i}": PeerEndpoint(f"tcp://127.0.0.1:{i + 1}", "k") for i in range(num_sharing)}
    for i in range(num_others):
        tree.on_join(f"o{i}", None)
    for name, peer in peers.items():
        tree.on_join(name, peer)
    return tree, peers


@pytest.mark.parametrize("num_sharing", [1, 2, 3, 16, 100])
def test_every_source_is_asked_by_few_and_every_way_ends_at_the_publisher(num_sharing):
    tree, peers = grown(num_sharing)
    ways = {name: tree.way_of(name) for name in peers}

    assert sum(not way for way in ways.values()) == min(FAN_OUT, num_sharing)
    nearest = [way[0] for way in ways.values() if way]
    assert all(nearest.count(peer) <= FAN_OUT for peer in nearest)
    name_of = {peer: name for name, peer in peers.items()}
    for way in ways.values():
        assert len(way) <= 6
        if way:
            assert ways[name_of[way[0]]] == way[1:]  # each peer's own way is the rest of it


def test_who_shares_nothing_is_asked_by_nobody():
    tree, peers = grown(3, num_others=20)

    ways = [tree.way_of(f"o{i}") for i in range(20)]

    assert all(way and set(way) <= set(peers.values()) for way in ways)
    assert tree.way_of("never heard") != ()
    assert grown(0, num_others=5)[0].way_of("o4") == ()


def test_those_behind_an_actor_that_is_gone_move_up():
    tree, peers = grown(5)
    assert tree.way_of("s4") == (peers["s1"],)

    tree.forget_all_but({"s0", "s2", "s4"})

    assert tree.way_of("s2") == ()
    assert tree.way_of("s4") == (peers["s0"],)
    tree.on_join("s0", None)
    assert tree.way_of("s4") == ()
    assert tree.way_of("s0") == (peers["s2"],)
