"""Sparse updates from a peer of the site: when they are on offer, and how they are checked."""

import asyncio
import mmap
from collections.abc import Iterable
from contextlib import asynccontextmanager

from actors.weights.held import HeldWeights
from actors.weights.sources import WeightSources
from actors.weights.staging_files import StagingFiles
from actors.weights.transfer import WeightTransfer
from actors.weights.updates import digests_of_link
from broker.protocol.manifest import BASE, SparseLink, chunk_digests
from broker.protocol.weight_messages import (
    CHUNK_BYTES,
    Announce,
    PeerEndpoint,
    Pull,
    SlicePending,
    Sources,
    VersionGone,
    WeightChunk,
)
from buffer.record.episode import PolicyVersion
from learner.weights.updates import SparseChain, SparseUpdate
from tests.weights.support.published import Published, here_and_there
from tests.weights.support.scripted_publisher import CALLER

UPDATE = bytes(range(200))


def link(base: int, version: int, num_bytes: int = len(UPDATE)) -> SparseLink:
    return SparseLink(PolicyVersion(1, base), PolicyVersion(1, version), num_bytes)


def asked(base: int, version: int, offset: int = 0) -> Pull:
    return Pull(PolicyVersion(1, version), offset, CHUNK_BYTES, PolicyVersion(1, base))


def holding(step: int) -> HeldWeights:
    held = HeldWeights()
    held.hold(PolicyVersion(1, step), mmap.mmap(-1, 100))
    return held


def test_an_update_is_on_offer_from_its_first_slice_until_the_chain_leaves_it_behind():
    held = holding(1)
    assert isinstance(held.answer(asked(1, 2)), SlicePending)

    held.begin_update(link(1, 2), bytearray(UPDATE))
    assert isinstance(held.answer(asked(1, 2)), SlicePending)
    held.arrived(0)

    chunk = WeightChunk(PolicyVersion(1, 2), 0, UPDATE, PolicyVersion(1, 1))
    assert held.answer(asked(1, 2)) == chunk
    held.hold(PolicyVersion(1, 2), mmap.mmap(-1, 100))
    held.keep_updates([link(1, 2), link(2, 3)])
    assert held.answer(asked(1, 2)) == chunk
    held.keep_updates([link(2, 3)])
    assert isinstance(held.answer(asked(1, 2)), VersionGone)


def test_an_update_that_did_not_come_is_not_on_offer():
    held = holding(1)
    held.begin_update(link(1, 2), bytearray(UPDATE))
    held.arrived(0)

    held.abandon()

    assert isinstance(held.answer(asked(1, 2)), SlicePending)  # of another source


def test_nobody_waits_for_an_update_at_an_actor_that_takes_the_version_whole():
    held = HeldWeights()
    assert isinstance(held.answer(asked(1, 2)), SlicePending)

    held.begin_version(PolicyVersion(1, 2), mmap.mmap(-1, 100))
    assert isinstance(held.answer(asked(1, 2)), VersionGone)
    assert isinstance(held.answer(asked(2, 3)), SlicePending)
    held.hold(PolicyVersion(1, 2), mmap.mmap(-1, 100))
    assert isinstance(held.answer(asked(1, 2)), VersionGone)
    assert isinstance(held.answer(asked(2, 3)), SlicePending)


def test_peers_have_no_adapters():
    adapter = Pull(PolicyVersion(1, 9), 0, CHUNK_BYTES, BASE)

    assert isinstance(holding(1).answer(adapter), VersionGone)


def test_each_update_is_checked_by_the_digests_of_its_own_slices():
    payloads = [bytes([n]) * size for n, size in enumerate((10, 2 * CHUNK_BYTES + 1, 5))]
    links = [link(n, n + 1, len(payload)) for n, payload in enumerate(payloads)]
    each = [chunk_digests(payload, CHUNK_BYTES) for payload in payloads]

    found = [digests_of_link(one, links, b"".join(each)) for one in links]

    assert found == each


class Scripted:
    """A source that has these updates; one that lies changes the first byte of each."""

    def __init__(self, name: str, updates: Iterable[SparseUpdate], *, lies: bool = False) -> None:
        self.name = name
        self.kind = "publisher" if name == "publisher" else "peers"
        self.num_asked = 0
        self._payloads = {(each.link.base, each.link.version): each.payload for each in updates}
        self._lies = lies

    @asynccontextmanager
    async def open(self, on_answer):
        def post(pull) -> bool:
            self.num_asked += 1
            payload = bytearray(self._payloads[pull.base, pull.version])
            payload[0] ^= self._lies
            chunk = WeightChunk(pull.version, pull.offset, bytes(payload), pull.base)
            asyncio.get_running_loop().call_soon(on_answer, chunk)
            return True

        yield post


class Found:
    """Version 3, fetched by an actor that holds version 1, from peers of whom some lie."""

    def __init__(self, folder, *lies: bool, has_digests: bool = True) -> None:
        published = Published(folder, chain=SparseChain())
        for step in range(1, 4):
            published.publish(step)
        assert published.versions.chain is not None
        updates = published.versions.chain.updates
        self.publisher = Scripted("publisher", updates)
        self.peers = [Scripted(f"peer {i}", updates, lies=lie) for i, lie in enumerate(lies)]
        self.left: dict[str, bool] = {}
        """Of the sources that were left: whether they had lied."""
        sources = WeightSources(lambda _: True, order=("peers", "publisher"), caller=CALLER)
        sources.choose_sources = self._of  # type: ignore[method-assign]
        sources.failed = self._failed  # type: ignore[method-assign,assignment]
        news = Announce(
            published.manifest(3),
            0,
            tuple(each.link for each in updates),
            Sources((PeerEndpoint("tcp://127.0.0.1:1", "k"),), b""),
            update_digests=b"".join(each.slice_digests for each in updates if has_digests),
        )
        asyncio.run(self._fetch(news, sources, folder / "staging"))

    async def _fetch(self, news: Announce, sources: WeightSources, staging) -> None:
        staged = asyncio.Event()
        files = StagingFiles("site", fallback=staging)
        transfer = WeightTransfer(
            files,
            post=lambda _: True,
            sources=sources,
            stage=lambda *_: staged.set(),
            timeout_s=2.0,
        )
        memory = mmap.mmap(-1, len(here_and_there(1)))
        memory[:] = here_and_there(1)
        transfer.held = PolicyVersion(1, 1)
        transfer.shared.hold(transfer.held, memory)
        running = asyncio.create_task(transfer.run())
        await asyncio.sleep(0)
        transfer.on_message(news)
        async with asyncio.timeout(10.0):
            await staged.wait()
        whole = transfer.shared.whole
        assert whole is not None
        self.is_right = whole[1][:] == here_and_there(3)
        self.counters = transfer.counters
        self.offers = [transfer.shared.answer(asked(n, n + 1)) for n in (1, 2)]
        running.cancel()
        await asyncio.wait({running})
        files.close()

    def _of(self, peers=()):
        return (*(self.peers if peers else ()), self.publisher)

    def _failed(self, source, _reason, has_lied) -> None:
        self.left[source.name] = has_lied


def test_updates_come_from_a_peer_and_are_passed_on(tmp_path):
    found = Found(tmp_path, False)

    assert found.is_right
    assert (found.peers[0].num_asked, found.publisher.num_asked) == (2, 0)
    assert (found.counters.sparse_pulls, found.counters.peer_bytes) == (
        1,
        found.counters.pulled_bytes,
    )
    assert [type(offer) for offer in found.offers] == [WeightChunk, WeightChunk]


def test_a_peer_whose_update_is_wrong_is_found_out_before_it_is_applied(tmp_path):
    found = Found(tmp_path, True, False)

    assert found.is_right
    assert found.left == {"peer 0": True}
    assert (found.counters.digest_mismatches, found.counters.sparse_pulls) == (0, 1)
    assert found.publisher.num_asked == 0


def test_where_every_peer_lies_the_updates_come_from_the_publisher(tmp_path):
    found = Found(tmp_path, True, True)

    assert found.is_right
    assert found.left == {"peer 0": True, "peer 1": True}
    assert found.publisher.num_asked == 2
    assert (found.counters.digest_mismatches, found.counters.peer_bytes) == (0, 0)


def test_without_digests_no_peer_is_asked_for_an_update_nor_is_one_kept(tmp_path):
    found = Found(tmp_path, False, has_digests=False)

    assert found.is_right
    assert (found.peers[0].num_asked, found.publisher.num_asked) == (0, 2)
    assert [type(offer) for offer in found.offers] == [VersionGone, VersionGone]
