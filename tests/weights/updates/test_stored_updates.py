"""Sparse updates and adapters in the object store: written once, in order, forgotten in time."""

import asyncio
from contextlib import asynccontextmanager
from functools import partial

import pytest
from msgspec import structs

from actors.weights.sources import WeightSources
from actors.weights.staging_files import StagingFiles
from actors.weights.transfer import WeightTransfer
from broker.protocol.manifest import SparseLink, chunk_digests, digest_of
from broker.protocol.weight_messages import CHUNK_BYTES, Announce, Sources
from broker.weights.object_store import KEPT, StoredWeights, WeightStore
from learner.weights.updates import sparse_chain
from learner.weights.updates.sparse_chain import SparseChain
from tests.waiting import until
from tests.weights.support.adapted_toy import AdaptedToy
from tests.weights.support.plane import Plane
from tests.weights.support.published import (
    NUM_BYTES,
    Published,
    here_and_there,
    play,
    refusing,
)
from tests.weights.support.scripted_publisher import CALLER


def sparse(folder) -> Published:
    return Published(folder, contents=here_and_there, chain=SparseChain())


def links_of(published: Published) -> tuple[SparseLink, ...]:
    assert published.versions.chain is not None
    return published.writer.located(published.versions.chain.updates)


def steps_of(objects: list[str]) -> list[int]:
    """Steps of the updates among these objects."""
    return sorted(int(name.split("-")[1]) for name in objects if "-from-" in name)


async def all_stored(published: Published, step: int) -> tuple[SparseLink, ...]:
    await published.stored(step)
    await until(lambda: all(link.store for link in links_of(published)))
    return links_of(published)


def test_each_update_is_in_the_store_under_the_digests_of_both_its_versions(tmp_path):
    async def story(published):
        for step in range(1, 4):
            published.publish(step)
            links = await all_stored(published, step)
        digests = [published.manifest(step).digest for step in range(4)]
        for link, step in zip(links, (2, 3), strict=True):
            assert link.store.endswith(
                f"/toy/weights/1-{step}-{digests[step]}-from-{digests[step - 1]}"
            )
            assert len(StoredWeights(link.store).read(0, 10**9)) == link.num_bytes < NUM_BYTES

    play(lambda: sparse(tmp_path), story)


def test_the_store_is_asked_about_each_update_once(tmp_path, monkeypatch):
    asked: list[str] = []
    has = WeightStore.has

    def asks(store, name, num_bytes):
        asked.append(name)
        return has(store, name, num_bytes)

    monkeypatch.setattr(WeightStore, "has", asks)

    async def story(published):
        for step in range(1, 5):
            published.publish(step)
            await all_stored(published, step)

    play(lambda: sparse(tmp_path), story)
    assert steps_of(asked) == [2, 3, 4]


def test_updates_that_the_chain_has_left_behind_are_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr(sparse_chain, "MAX_LINKS", 2)

    async def story(published):
        for step in range(1, 10):
            published.publish(step)
            links = await all_stored(published, step)
        await until(lambda: len(steps_of(published.objects())) == len(links) + KEPT)
        return steps_of(published.objects())

    assert play(lambda: sparse(tmp_path), story) == [5, 6, 7, 8, 9]


def test_a_chain_with_a_hole_is_mended_when_the_store_answers_again(tmp_path, monkeypatch):
    async def story(published):
        published.publish(1)
        await published.stored(1)
        with monkeypatch.context() as broken:
            refused = refusing(broken)
            published.publish(2)
            await until(lambda: any("-from-" in name for name in refused))
            assert not any(link.store for link in links_of(published))
        published.publish(3)
        return await all_stored(published, 3)

    assert [link.version.step for link in play(lambda: sparse(tmp_path), story)] == [2, 3]


def test_the_base_of_adapters_is_stored_once_and_of_each_version_the_adapter(tmp_path, monkeypatch):
    written: list[str] = []
    create = WeightStore.create

    def creates(store, name):
        written.append(name)
        return create(store, name)

    monkeypatch.setattr(WeightStore, "create", creates)
    base = bytes(NUM_BYTES)

    async def story(published):
        for step in (1, 2):
            adapter = bytes([step]) * 100
            published.publish(step, adapter)
            urls_of = partial(published.writer.urls_of, published.manifest(step, adapter))
            await until(lambda: all(urls_of()))  # noqa: B023 - called at once
            whole, stored, at = urls_of()
            assert StoredWeights(whole).read(0, 10**9) == here_and_there(step)
            assert StoredWeights(stored).read(0, NUM_BYTES) == adapter
            assert StoredWeights(at).read(0, NUM_BYTES) == base
        return [f"base-{digest_of([base])}"]

    found = play(lambda: Published(tmp_path, contents=here_and_there, base=base), story)
    assert [name for name in written if name.startswith("base-")] == found
    assert len(written) == 5


class Far:
    """A transfer far away: it can ask the store alone."""

    def __init__(self, folder) -> None:
        self.files = StagingFiles("far", fallback=folder)
        self.staged: list[tuple[int, bytes]] = []
        self.arrived = asyncio.Event()
        self.transfer = WeightTransfer(
            self.files,
            post=lambda _message: False,
            sources=WeightSources(lambda _message: False, order=("store",), caller=CALLER),
            stage=self._stage,
            timeout_s=5.0,
        )

    def _stage(self, manifest, file) -> None:
        self.staged.append((manifest.version.step, file.memory[:]))
        self.files.release(file)
        self.arrived.set()

    @asynccontextmanager
    async def running(self):
        """Transfer until the block ends, and forget what lies here."""
        async with asyncio.timeout(20.0), asyncio.TaskGroup() as tasks:
            running = tasks.create_task(self.transfer.run())
            await asyncio.sleep(0)
            yield
            running.cancel()
        self.files.close()

    async def take(self, published: Published, step: int, links: tuple[SparseLink, ...]) -> None:
        digests = chunk_digests(here_and_there(step), CHUNK_BYTES)
        sources = Sources((), digests, *published.writer.urls_of(published.manifest(step)))
        self.arrived.clear()
        news = Announce(published.manifest(step), 0, links, sources)

        def has_taken() -> bool:
            self.transfer.on_message(news)  # as the publisher does every 2 s
            return self.transfer.held.step >= step

        if self.transfer.held.step < step:
            await until(has_taken, every_s=0.05)


@pytest.mark.parametrize("harm", ["none", "spoilt", "removed", "not there yet"])
def test_an_actor_far_away_takes_the_chain_and_all_bytes_where_it_leads_nowhere(tmp_path, harm):
    async def story(published):
        far = Far(tmp_path)
        async with far.running():
            published.publish(1)
            await published.stored(1)
            await far.take(published, 1, ())
            for step in (2, 3):
                published.publish(step)
                links = await all_stored(published, step)
            if harm == "not there yet":
                links = (links[0], structs.replace(links[1], store=""))
            else:
                _harm(published, links[1], harm)
            await far.take(published, 3, links)
        return far

    far = play(lambda: sparse(tmp_path), story)
    counters = far.transfer.counters
    is_good = harm == "none"
    assert far.staged == [(1, here_and_there(1)), (3, here_and_there(3))]
    assert (counters.pulls, counters.sparse_pulls) == (2, int(is_good))
    assert (counters.store_bytes < 1.2 * NUM_BYTES) == is_good
    assert counters.store_bytes == counters.pulled_bytes


def _harm(published: Published, link: SparseLink, harm: str) -> None:
    files, path = published.store._files, link.store.partition("://")[2]
    if harm == "removed":
        files.rm(path)
    elif harm == "spoilt":
        stored = bytearray(files.cat_file(path))
        stored[len(stored) // 2] ^= 1
        files.pipe_file(path, bytes(stored))


def test_an_update_that_is_not_stored_yet_is_waited_for_where_nothing_else_is(tmp_path):
    async def story(published):
        far = Far(tmp_path)
        async with far.running():
            published.publish(1)
            await published.stored(1)
            await far.take(published, 1, ())
            published.publish(2)
            links = await all_stored(published, 2)
            unstored = (structs.replace(links[0], store=""),)
            far.transfer.on_message(Announce(published.manifest(2), 0, unstored))
            await asyncio.sleep(0.1)
            assert far.transfer.held.step == 1
            far.transfer.on_message(Announce(published.manifest(2), 0, links))
            await until(lambda: far.transfer.held.step == 2)
        return far.transfer.counters

    assert play(lambda: sparse(tmp_path), story).sparse_pulls == 1


def test_who_lacks_the_base_of_a_chain_takes_all_bytes(tmp_path):
    async def story(published):
        far = Far(tmp_path)
        async with far.running():
            for step in (1, 2, 3):
                published.publish(step)
                links = await all_stored(published, step)
            await far.take(published, 3, links)
        return far

    far = play(lambda: sparse(tmp_path), story)
    assert far.staged == [(3, here_and_there(3))]
    assert far.transfer.counters.store_bytes == NUM_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("form", ["sparse", "adapter"])
def test_an_actor_far_away_follows_by_updates_from_a_folder(tmp_path, form):
    model = AdaptedToy(ballast=500_000) if form == "adapter" else None
    plane = Plane(
        tmp_path,
        ballast=500_000,
        model=model,
        sparse_weights=form == "sparse",
        weight_store=f"file://{tmp_path}/bucket",
    )
    try:
        plane.publish()
        far = plane.actor("far", pull_from=("peers", "store"), timeout_s=30.0)
        far.wait("synced", timeout_s=60.0)
        before = far.counters()["store_bytes"]
        newest = plane.publish() if form == "adapter" else plane.publish_little()
        assert far.applied(newest)["digest"] == newest.digest
        counters = far.counters()
    finally:
        plane.close()
    assert counters["store_bytes"] == counters["pulled_bytes"]
    assert 0 < counters["store_bytes"] - before < newest.num_bytes / 50
    assert counters["digest_mismatches"] == 0
