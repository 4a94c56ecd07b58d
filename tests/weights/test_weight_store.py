"""Weights in an object store: in memory where one process is enough, in a folder where it is not.

No bucket is at hand; fsspec gives all kinds of stores the same methods.
"""

import asyncio
import mmap
from pathlib import Path

import pytest

from actors.weights.slices import SlicePull
from actors.weights.sources import StoreSource, WeightSources
from broker.protocol.manifest import (
    chunk_digests,
)
from broker.protocol.weight_messages import CHUNK_BYTES, Pull, Sources
from broker.weights.object_store import KEPT, StoredWeights, WeightStore, version_name
from buffer.record.episode import PolicyVersion
from configs.errors import DeadlineError, SettingsError
from tests.waiting import until
from tests.weights.support.plane import Plane
from tests.weights.support.published import NUM_BYTES, Published, all_over, play, refusing
from tests.weights.support.scripted_publisher import CALLER


def test_the_newest_versions_are_in_the_store_under_their_digests(tmp_path):
    async def story(published):
        for step in range(1, 6):
            published.publish(step)
            url = await published.stored(step)
            assert url.endswith(f"/toy/weights/1-{step}-{published.manifest(step).digest}")
        assert StoredWeights(url).read(0, NUM_BYTES) == all_over(5)
        await until(lambda: len(published.objects()) == KEPT)
        assert [bool(published.url_of(step)) for step in (2, 3)] == [False, True]
        return published.objects()

    found = play(lambda: Published(tmp_path), story)
    assert [name.split("-")[1] for name in found] == ["3", "4", "5"]


def test_a_version_that_is_overtaken_is_not_named_and_the_newest_is(tmp_path, monkeypatch):
    async def story(published):
        read = published.versions.read
        overtaken: list[Pull] = []

        def reads(actor, pull: Pull):
            if pull.version.step == 1 and pull.offset and not overtaken:
                overtaken.append(pull)
                monkeypatch.setattr(
                    "learner.weights.versions_on_offer.PULL_IDLE_S", -1.0
                )  # as if the store were slow
                published.publish(2)
            return read(actor, pull)

        published.versions.read = reads
        published.publish(1)
        await published.stored(2)
        assert overtaken
        assert not published.url_of(1)

    play(lambda: Published(tmp_path), story)


def test_a_version_that_is_there_is_not_written_again_and_half_of_one_is(tmp_path, monkeypatch):
    async def story(published):
        for step, found in ((1, all_over(1)), (2, all_over(2)[:9])):
            digest = published.manifest(step).digest
            path = published.store._path(version_name(PolicyVersion(1, step), digest))
            published.store._files.pipe_file(path, found)
        written = []
        create = WeightStore.create

        def creates(store, name):
            written.append(name[:4])
            return create(store, name)

        monkeypatch.setattr(WeightStore, "create", creates)
        for step in (1, 2):
            published.publish(step)
            url = await published.stored(step)
        assert StoredWeights(url).read(0, NUM_BYTES) == all_over(2)
        return written

    assert play(lambda: Published(tmp_path), story) == ["1-2-"]


def test_a_store_that_fails_costs_a_version_and_nothing_else(tmp_path, monkeypatch):
    async def story(published):
        with monkeypatch.context() as broken:
            refused = refusing(broken)
            published.publish(1)
            await until(lambda: refused)
        published.publish(2)
        await published.stored(2)

    play(lambda: Published(tmp_path), story)


def pulled(url: str, step: int) -> bytes:
    memory = mmap.mmap(-1, NUM_BYTES)

    async def pull() -> None:
        made = SlicePull(
            PolicyVersion(1, step),
            memory,
            sources=[StoreSource(url)],
            digests=chunk_digests(all_over(step), CHUNK_BYTES),
            progress_timeout_s=5.0,
        )
        assert await made.run() is None
        assert made.num_bytes["store"] == NUM_BYTES

    asyncio.run(pull())
    return memory[:]


def test_what_is_stored_is_pulled_and_what_was_harmed_or_removed_is_not(tmp_path):
    url = f"file://{tmp_path}/version"
    Path(tmp_path, "version").write_bytes(all_over(1))
    assert pulled(url, 1) == all_over(1)

    Path(tmp_path, "version").write_bytes(all_over(1)[:-1] + b"?")
    with pytest.raises(DeadlineError, match="must make progress"):
        pulled(url, 1)
    Path(tmp_path, "version").unlink()
    with pytest.raises(DeadlineError, match="must make progress"):
        pulled(url, 1)


def test_the_order_of_sources_is_that_of_the_settings():
    offered = Sources((), b"", "memory://somewhere")

    def kinds(*order, offered=offered):
        sources = WeightSources(lambda _: True, order=order, caller=CALLER)
        found = [source.kind for source in sources.of(offered)]
        sources.close()
        return found

    assert kinds("peers", "publisher") == ["publisher"]
    assert kinds("store", "publisher") == ["store", "publisher"]
    assert kinds("publisher", "store") == ["publisher", "store"]
    assert kinds("peers", "store", offered=None) == []


@pytest.mark.slow
def test_an_actor_far_away_follows_by_the_store_alone(tmp_path):
    plane = Plane(tmp_path, ballast=2_000_000, weight_store=f"file://{tmp_path}/bucket")
    try:
        plane.publish()
        near = plane.actor("near")
        far = plane.actor("far", pull_from=("peers", "store"), timeout_s=30.0)
        for actor in (near, far):
            actor.wait("synced", timeout_s=60.0)

        newest = plane.publish()

        for actor in (near, far):
            assert actor.applied(newest)["digest"] == newest.digest
        counters = far.counters()
    finally:
        plane.close()
    assert counters["store_bytes"] == counters["pulled_bytes"] > 0
    assert counters["broadcasts"] == counters["digest_mismatches"] == 0


def test_a_store_of_no_known_kind_is_refused_before_anything_is_published(tmp_path):
    with pytest.raises(SettingsError, match="weight_store must be a URL that fsspec knows, got"):
        Plane(tmp_path, weight_store="nowhere://bucket")
