"""Records outside of Redis, in a folder and in fsspec's memory; no bucket is tested."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import fsspec
import pytest

from buffer.record import object_store as objects
from buffer.record.object_store import LONGEST_REFERENCE, MAGIC, ObjectStore, is_reference
from configs.errors import RecordError, SettingsError, StoreUnreachable
from configs.tables.buffer import BufferSettings

RECORD = b"\x8f" + bytes(range(256)) * 40


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    url = f"file://{tmp_path}/objects" if request.param == "file" else f"memory://{tmp_path}"
    return ObjectStore(url, "run")


def referring_to(*references: bytes) -> Callable[[Sequence[int]], list[bytes]]:
    """Make a store that has these references, by task."""
    return lambda ids: [references[i] if i < len(references) else b"" for i in ids]


def test_a_record_comes_back_by_its_reference(store: ObjectStore) -> None:
    reference = store.put_record(7, RECORD)

    assert is_reference(reference) and not is_reference(RECORD)
    assert len(reference) <= LONGEST_REFERENCE
    assert store.get(7, reference) == RECORD
    assert store.put_record(7, RECORD) == reference


@pytest.mark.parametrize("junk", [b"", b"\xff", b"../../etc/passwd 3", b"0" * 64 + b" many"])
def test_what_is_no_reference_is_refused(store: ObjectStore, junk: bytes) -> None:
    with pytest.raises(RecordError, match="must hold SHA-256 and length"):
        store.get(7, MAGIC + junk)


def test_another_task_cannot_borrow_a_reference(store: ObjectStore) -> None:
    reference = store.put_record(7, RECORD)

    with pytest.raises(RecordError, match="must exist, got none"):
        store.get(8, reference)


@pytest.mark.parametrize("harm", ["changed", "cut off"])
def test_an_object_that_was_harmed_is_refused(tmp_path: Path, harm: str) -> None:
    store = ObjectStore(f"file://{tmp_path}", "run")
    reference = store.put_record(7, RECORD)
    (path,) = tmp_path.glob("run/0/7-*")
    path.write_bytes(RECORD[:-1] + b"?" if harm == "changed" else RECORD[:-1])

    with pytest.raises(RecordError, match="it was changed or cut off"):
        store.get(7, reference)


def test_an_object_that_was_cut_off_is_written_again_and_a_whole_one_is_not(
    tmp_path: Path,
) -> None:
    store = ObjectStore(f"file://{tmp_path}", "run")
    reference = store.put_record(7, RECORD)
    (path,) = tmp_path.glob("run/0/7-*")
    path.write_bytes(RECORD[:9])

    store.put_record(7, RECORD)
    written = path.stat().st_ino, path.stat().st_mtime_ns
    store.put_record(7, RECORD)

    assert (path.stat().st_ino, path.stat().st_mtime_ns) == written
    assert store.get(7, reference) == RECORD


def test_a_sweep_removes_what_the_store_does_not_refer_to(store: ObjectStore) -> None:
    kept, other, gone = (
        store.put_record(0, RECORD),
        store.put_record(1, RECORD + b"1"),
        store.put_record(2, RECORD),
    )
    newer = store.put_record(1, RECORD + b"2")

    assert store.sweep(referring_to(kept, newer), older_than_s=3600) == 0
    assert store.sweep(referring_to(kept, newer), older_than_s=0) == 2

    assert store.get(0, kept) == RECORD
    assert store.get(1, newer) == RECORD + b"2"
    for task, reference in ((1, other), (2, gone)):
        with pytest.raises(RecordError):
            store.get(task, reference)


def test_only_old_objects_are_swept(tmp_path: Path) -> None:
    store = ObjectStore(f"file://{tmp_path}", "run")
    store.put_record(0, RECORD), store.put_record(1, RECORD)
    (old,) = tmp_path.glob("run/0/0-*")
    os.utime(old, (time.time() - 7200,) * 2)

    assert store.sweep(referring_to(), older_than_s=3600) == 1
    assert not old.exists()


def test_a_sweep_of_another_run_or_of_nothing_leaves_all(
    store: ObjectStore, tmp_path: Path
) -> None:
    assert store.sweep(referring_to(), older_than_s=0) == 0
    reference = store.put_record(0, RECORD)

    ObjectStore(f"file://{tmp_path}/objects", "other").sweep(referring_to(), older_than_s=0)

    assert store.get(0, reference) == RECORD


def test_an_object_store_that_does_not_answer_is_not_a_bad_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "READ_PAUSES_S", (0.0, 0.0))
    store = ObjectStore(f"file://{tmp_path}", "run")
    reference = store.put_record(7, RECORD)
    (path,) = tmp_path.glob("run/0/7-*")
    path.unlink()
    path.mkdir()  # reading a folder is an OSError, and not that it is missing

    with pytest.raises(StoreUnreachable, match="must be readable"):
        store.get(7, reference)


def test_settings_name_an_object_store_or_none(tmp_path: Path) -> None:
    assert ObjectStore.from_settings(BufferSettings(), "run") is None
    assert (
        ObjectStore.from_settings(BufferSettings(object_store=f"file://{tmp_path}"), "run")
        is not None
    )
    with pytest.raises(SettingsError, match="must be a URL that fsspec knows, got 'nowhere://x'"):
        ObjectStore.from_settings(BufferSettings(object_store="nowhere://x"), "run")
    assert "file" in fsspec.available_protocols()
