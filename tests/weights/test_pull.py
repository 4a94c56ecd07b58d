"""Pulls and transfers against a scripted publisher: lost, repeated, wrong and corrupt slices."""

import asyncio
import mmap

import numpy as np
import pytest
from msgspec import structs

from actors.weights import slices
from actors.weights.slices import SlicePull
from actors.weights.staging_files import StagingFiles
from actors.weights.transfer import MAX_MISMATCHES
from broker.protocol.manifest import (
    SparseLink,
)
from broker.protocol.weight_messages import PULL_CREDIT, Announce, WeightChunk
from broker.weights import sparse
from buffer.record.episode import PolicyVersion
from configs.errors import DeadlineError, WeightsError
from tests.weights.support.scripted_publisher import (
    CHUNK_BYTES,
    NUM_BYTES,
    ScriptedPublisher,
    contents,
    manifest,
    only,
    play,
)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(slices, "CHUNK_BYTES", CHUNK_BYTES)


@pytest.fixture
def publisher():
    return ScriptedPublisher()


@pytest.fixture
def memory():
    return mmap.mmap(-1, NUM_BYTES)


async def pulled(publisher, memory, step=1, timeout_s=5.0):
    version = manifest(step).version
    sources = only(publisher).choose_sources()
    pull = SlicePull(version, memory, sources=sources, progress_timeout_s=timeout_s)
    publisher.answer = pull.on_answer
    return await pull.run()


def test_a_pull_fills_the_memory_within_its_credit(publisher, memory):
    assert asyncio.run(pulled(publisher, memory)) is None

    assert memory[:] == contents(1)
    assert len(publisher.asked) == 7
    assert publisher.most_outstanding == PULL_CREDIT


def test_a_lost_request_is_repeated(publisher, memory, monkeypatch):
    monkeypatch.setattr(slices, "FIRST_WAIT_S", 0.05)
    publisher.lose = {0, 2 * CHUNK_BYTES}

    assert asyncio.run(pulled(publisher, memory)) is None

    assert memory[:] == contents(1)


def test_all_that_was_lost_is_repeated(publisher, memory, monkeypatch):
    monkeypatch.setattr(slices, "FIRST_WAIT_S", 0.05)
    publisher.lose = {i * CHUNK_BYTES for i in range(PULL_CREDIT)}  # as when a publisher dies

    assert asyncio.run(pulled(publisher, memory)) is None

    assert memory[:] == contents(1)
    assert [pull.num_bytes for pull in publisher.asked].count(CHUNK_BYTES) == 6 + PULL_CREDIT


def test_of_a_slow_publisher_no_slice_is_asked_for_twice(publisher, memory, monkeypatch):
    monkeypatch.setattr(slices, "FIRST_WAIT_S", 0.02)
    publisher.delay_s = 0.1

    assert asyncio.run(pulled(publisher, memory)) is None

    assert memory[:] == contents(1)
    asked = [pull.num_bytes for pull in publisher.asked]
    assert asked.count(CHUNK_BYTES) == 6  # and one of four bytes
    assert 1 < len(asked) - 6 < 12  # whether anything was lost was asked at growing intervals


def test_an_inquiry_that_is_late_asks_for_nothing_again(publisher, memory, monkeypatch):
    monkeypatch.setattr(slices, "FIRST_WAIT_S", 0.02)
    publisher.lose = {i * CHUNK_BYTES for i in range(PULL_CREDIT)}
    publisher.delay_s = 0.15  # the first two inquiries are on their way together

    assert asyncio.run(pulled(publisher, memory)) is None

    assert memory[:] == contents(1)
    asked = [pull.num_bytes for pull in publisher.asked]
    assert asked.count(CHUNK_BYTES) == 6 + PULL_CREDIT


def test_a_pull_ends_when_nothing_comes(publisher, memory, monkeypatch):
    monkeypatch.setattr(slices, "FIRST_WAIT_S", 0.02)
    publisher.post = lambda message: False

    with pytest.raises(
        DeadlineError, match=r"must make progress within 0\.1 s, got nothing more of"
    ):
        asyncio.run(pulled(publisher, memory, timeout_s=0.1))


def test_a_version_that_is_gone_is_answered_by_a_newer_one(publisher, memory):
    publisher.newer = manifest(2)

    assert asyncio.run(pulled(publisher, memory)).manifest == manifest(2)


def test_slices_that_were_not_asked_for_are_not_written(publisher, memory):
    async def story():
        sources = only(publisher).choose_sources()
        pull = SlicePull(manifest(1).version, memory, sources=sources, progress_timeout_s=5.0)
        publisher.answer = pull.on_answer
        pull.on_answer(WeightChunk(PolicyVersion(1, 0), 0, b"x" * CHUNK_BYTES))  # another version
        pull.on_answer(WeightChunk(PolicyVersion(1, 1), 1, b"x" * CHUNK_BYTES))  # another place
        pull.on_answer(WeightChunk(PolicyVersion(1, 1), 0, b"x"))  # another length
        older = PolicyVersion(1, 0)
        sparse_update = WeightChunk(PolicyVersion(1, 1), 0, b"x" * CHUNK_BYTES, older)
        pull.on_answer(sparse_update)
        await pull.run()

    asyncio.run(story())

    assert memory[:] == contents(1)


def test_corrupt_bytes_are_never_staged_but_pulled_again(publisher, tmp_path):
    publisher.spoil = 1

    async def story(stage):
        stage.transfer.on_message(Announce(manifest(1), 0))
        await stage.arrived.wait()

    stage = play(publisher, tmp_path, story)

    assert stage.bytes == [contents(1)]
    assert stage.transfer.counters.digest_mismatches == 1


def test_bytes_that_stay_corrupt_end_the_actor(publisher, tmp_path):
    publisher.spoil = 10**6

    async def story(stage):
        stage.transfer.on_message(Announce(manifest(1), 0))
        await stage.arrived.wait()

    with pytest.raises(ExceptionGroup) as raised:
        play(publisher, tmp_path, story)
    assert raised.group_contains(
        WeightsError,
        match=rf"digest of weights \(1, 1\) must be .* another one {MAX_MISMATCHES} times",
    )


def test_announcing_a_version_again_does_not_excuse_its_corrupt_bytes(publisher, tmp_path):
    publisher.spoil = 10**6

    async def story(stage):
        async with asyncio.timeout(20):
            while True:  # as the publisher does while an actor's JOIN has an older version
                stage.transfer.on_message(Announce(manifest(1), 0))
                await asyncio.sleep(0)

    with pytest.raises(ExceptionGroup) as raised:
        play(publisher, tmp_path, story)
    assert raised.group_contains(WeightsError, match=rf"another one {MAX_MISMATCHES} times")
    assert not raised.group_contains(RuntimeError)


def test_an_announcement_after_the_end_starts_nothing(publisher, tmp_path):
    async def story(stage):
        stage.transfer.on_message(Announce(manifest(1), 0))
        await stage.arrived.wait()

    stage = play(publisher, tmp_path, story)
    stage.transfer.on_message(Announce(manifest(2), 0))

    assert stage.transfer.held == (1, 1)


def test_the_newest_of_several_announcements_is_what_counts(publisher, tmp_path):
    async def story(stage):
        stage.transfer.on_message(Announce(manifest(1), 0))
        await asyncio.sleep(0)  # the first pull has begun
        await asyncio.sleep(0)
        assert publisher.asked
        stage.transfer.on_message(Announce(manifest(2), 0))
        stage.transfer.on_message(Announce(manifest(3), 0))
        while stage.transfer.held != (1, 3):
            stage.arrived.clear()
            await stage.arrived.wait()

    stage = play(publisher, tmp_path, story)

    assert [m.version.step for m in stage.staged] == [1, 3]


def test_older_versions_and_lower_lineages_are_refused(publisher, tmp_path):
    async def story(stage):
        stage.transfer.on_message(Announce(manifest(5, lineage=2), 0))
        await stage.arrived.wait()
        asked = len(publisher.asked)
        for refused in (manifest(5, lineage=2), manifest(4, lineage=2), manifest(9, lineage=1)):
            stage.transfer.on_message(Announce(refused, 0))
            stage.transfer.on_message(Announce(refused, 7))
        await asyncio.sleep(0.05)
        assert len(publisher.asked) == asked
        assert stage.transfer.counters.pulls == 1

    stage = play(publisher, tmp_path, story)

    assert [m.version for m in stage.staged] == [(2, 5)]
    assert not publisher.faults  # nor was it waiting for one of these epochs


def test_an_announced_epoch_that_never_comes_ends_in_a_pull(publisher, tmp_path):
    async def story(stage):
        stage.transfer.on_message(Announce(manifest(1), 7))
        await stage.arrived.wait()

    stage = play(publisher, tmp_path, story, timeout_s=0.1)

    assert stage.transfer.counters.pulls == 1
    assert "no success within 0.1 s" in publisher.faults[0].reason


def link(base: int, version: int, publisher) -> SparseLink:
    """A link that the publisher has."""
    old, new = (np.frombuffer(contents(step), "<u2").copy() for step in (base, version))
    update, _ = sparse.encode_changes(old, new)
    assert update is not None
    publisher.updates[base, version] = update
    return SparseLink(PolicyVersion(1, base), PolicyVersion(1, version), len(update))


def told(stage, step: int, links=()):
    stage.arrived.clear()
    stage.transfer.on_message(Announce(manifest(step), 0, tuple(links)))
    return stage.arrived.wait()


def test_who_has_an_older_version_pulls_only_the_changes_since(publisher, tmp_path):
    async def story(stage):
        await told(stage, 1)
        await told(stage, 3, [link(0, 1, publisher), link(1, 2, publisher), link(2, 3, publisher)])

    stage = play(publisher, tmp_path, story)

    assert stage.bytes == [contents(1), contents(3)]
    asked = {(pull.base and pull.base.step, pull.version.step) for pull in publisher.asked}
    assert asked == {(None, 1), (1, 2), (2, 3)}
    assert stage.transfer.counters.sparse_pulls == 1
    assert stage.transfer.counters.pulled_bytes < NUM_BYTES + NUM_BYTES // 2


@pytest.mark.parametrize("have", [1, 2], ids=["behind the chain", "no link from it"])
def test_without_a_chain_from_what_is_here_all_bytes_are_pulled(publisher, tmp_path, have):
    async def story(stage):
        await told(stage, have)
        await told(stage, 4, [link(3, 4, publisher)])

    stage = play(publisher, tmp_path, story)

    assert stage.bytes == [contents(have), contents(4)]
    assert stage.transfer.counters.sparse_pulls == 0


def test_a_chain_longer_than_the_version_is_not_taken(publisher, tmp_path):
    async def story(stage):
        await told(stage, 1)
        long = [link(step, step + 1, publisher) for step in (1, 2)]
        await told(stage, 3, [structs.replace(each, num_bytes=NUM_BYTES // 2) for each in long])

    assert play(publisher, tmp_path, story).transfer.counters.sparse_pulls == 0


@pytest.mark.parametrize("fault", ["corrupt", "torn", "of another version", "gone"])
def test_changes_that_do_not_lead_to_the_digest_are_replaced_by_all_bytes(
    publisher, tmp_path, fault
):
    async def story(stage):
        await told(stage, 1)
        step = link(1, 2, publisher)
        update = publisher.updates[1, 2]
        if fault == "corrupt":
            middle = len(update) // 2
            flipped = bytes([update[middle] ^ 1])
            publisher.updates[1, 2] = update[:middle] + flipped + update[middle + 1 :]
        elif fault == "torn":
            publisher.updates[1, 2] = update[:-2]
            step = structs.replace(step, num_bytes=len(update) - 2)
        elif fault == "of another version":
            link(1, 3, publisher)
            publisher.updates[1, 2] = publisher.updates[1, 3]
            step = structs.replace(step, num_bytes=len(publisher.updates[1, 3]))
        else:
            del publisher.updates[1, 2]
        await told(stage, 2, [step])

    stage = play(publisher, tmp_path, story)

    assert stage.bytes == [contents(1), contents(2)]
    assert stage.transfer.counters.sparse_pulls == 0


def test_a_version_that_a_chain_begins_at_is_not_written_to_while_it_is_used(publisher, tmp_path):
    async def story(stage):
        stage.keeps = True  # the engine still reads them all
        await told(stage, 1)
        for step in range(2, 6):
            await told(stage, step, [link(step - 1, step, publisher)])
        assert [file.memory[:] for file in stage.kept] == [contents(step) for step in range(1, 6)]

    assert play(publisher, tmp_path, story).transfer.counters.sparse_pulls == 4


def test_a_shared_file_is_given_out_again_after_its_last_user(tmp_path):
    files = StagingFiles("test", fallback=tmp_path)
    file = files.acquire(100)
    files.share(file)

    files.release(file)
    assert files.acquire(100) is not file
    files.release(file)
    assert files.acquire(100) is file
    files.close()
