"""Episodes of tasks, from records in Redis and in the object store."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from buffer import operations
from buffer.operations.values import ClaimedUnit, NewTask, SubmitLine
from buffer.record.codec import encode_episode
from buffer.record.object_store import ObjectStore
from buffer.store import Store
from configs.errors import RecordError
from learner.data.records import Records
from learner.data.retrying_store import RetryingStore
from tests.learner.support.made_episodes import make_episode
from tests.learner.support.tiny_run import LEASE_MS, begin_run, tiny_settings


@dataclass(slots=True)
class Bench:
    """A run whose tasks 0 to 3 are one group, each record in the object store."""

    store: Store
    objects: ObjectStore
    records: Records
    folder: Path

    def names(self) -> list[str]:
        """The tasks whose objects are there."""
        return sorted(path.name.partition("-")[0] for path in self.folder.rglob("*-*"))


@pytest.fixture
def bench(redis_url: str, tmp_path: Path) -> Iterator[Bench]:
    url = f"file://{tmp_path}/objects"
    settings = tiny_settings(tmp_path, buffer={"object_store": url})
    with Store(redis_url, settings.run.name) as store:
        begin_run(store, settings.run)
        store.run(operations.begin_lineage(0, 0))
        store.run(operations.create(1, [NewTask(i, 0, b"") for i in range(4)]))
        lease = store.run(operations.lease("a", ttl_ms=LEASE_MS, n=4, version=(1, 0)))
        objects = ObjectStore(url, settings.run.name)
        rows = [
            SubmitLine(
                t.task_id,
                t.fence,
                objects.put_record(t.task_id, encode_episode(make_episode(t.task_id))),
            )
            for t in lease.tasks
        ]
        assert set(store.run(operations.submit(rows))) == {"OK"}
        records = Records(RetryingStore(store), settings.run, settings.buffer, settings.rewards)
        yield Bench(store, objects, records, tmp_path / "objects")


def test_records_by_reference_are_read_like_others(bench: Bench) -> None:
    ((_, episodes),) = bench.records.units([ClaimedUnit(0, [0, 1, 2, 3])])

    assert episodes is not None
    assert [episode.task_id for episode in episodes] == [0, 1, 2, 3]
    assert [episode.task_id for episode in bench.records.episodes([2, 1])] == [2, 1]


def test_a_unit_without_one_of_its_objects_is_unreadable(bench: Bench) -> None:
    next(bench.folder.rglob("2-*")).unlink()

    ((_, episodes),) = bench.records.units([ClaimedUnit(0, [0, 1, 2, 3])])

    assert episodes is None
    with pytest.raises(RecordError, match="must exist"):
        bench.records.episodes([2])


def test_a_learner_without_the_object_store_says_what_is_missing(
    bench: Bench, tmp_path: Path
) -> None:
    settings = tiny_settings(tmp_path)
    records = Records(RetryingStore(bench.store), settings.run, settings.buffer, settings.rewards)

    with pytest.raises(RecordError, match=r"got a reference to .*; set buffer\.object_store"):
        records.episodes([0])


def test_a_record_that_is_gone_or_of_another_group_is_refused(bench: Bench) -> None:
    with pytest.raises(RecordError, match="record of task 9 must be in the store, got none"):
        bench.records.episodes([9])
    ((_, episodes),) = bench.records.units([ClaimedUnit(1, [0])])
    assert episodes is None


def test_a_bucket_that_lists_nothing_keeps_its_garbage_and_ends_nobody(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_root: str) -> list[str]:
        raise OSError("response body error")

    bench.objects.put_record(3, b"what a stale submission left behind")
    with monkeypatch.context() as broken:
        broken.setattr(bench.records._objects._files, "find", refuse)  # type: ignore[union-attr]
        bench.records.sweep(older_than_s=0.0)
    assert bench.names() == ["0", "1", "2", "3", "3"]

    bench.records.sweep(older_than_s=0.0)
    assert bench.names() == ["0", "1", "2", "3"]


def test_objects_go_once_their_batch_is_committed_and_not_before(bench: Bench) -> None:
    bench.objects.put_record(3, b"what a stale submission left behind")
    bench.records.sweep()
    assert bench.names() == ["0", "1", "2", "3", "3"]

    bench.records.sweep(older_than_s=0.0)
    assert bench.names() == ["0", "1", "2", "3"]

    bench.store.run(operations.claim(1, 1, 1))
    bench.store.run(operations.seal(1, 1))
    bench.store.run(operations.advance(1, 1))
    bench.records.sweep(older_than_s=0.0)
    assert bench.names() == ["0", "1", "2", "3"]

    bench.store.run(operations.commit(1, 1))
    bench.records.sweep(older_than_s=0.0)
    assert bench.names() == []
