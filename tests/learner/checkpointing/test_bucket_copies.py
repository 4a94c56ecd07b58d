"""Copies of checkpoints elsewhere: by fsspec and by obstore, both in memory."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
from obstore.exceptions import GenericError
from obstore.fsspec import FsspecStore

from buffer.record.filesystems import OSErrorProxy, filesystem_at
from configs.errors import CheckpointError, SettingsError
from learner.checkpointing import bucket_copies
from learner.checkpointing.bucket_copies import COMMITTED, BucketCopies
from learner.checkpointing.learner_state import LearnerState
from learner.checkpointing.manifest import KEY
from learner.reporting.metrics import Totals
from tests.learner.support.stored_bytes import WEIGHTS, StoredBytes, stored

STATE = LearnerState("r", "h", 1, lineage=1, cursor=0, trained=(), totals=Totals())
ROOT = "bucket/tiny/checkpoints"


@pytest.fixture(params=["fsspec", "obstore"])
def bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The filesystem at the URL of the copies; the root of it is empty."""
    files: Any = fsspec.filesystem("memory", skip_instance_cache=True)
    if request.param == "obstore":
        files = OSErrorProxy(_memory())
    monkeypatch.setattr(bucket_copies, "filesystem_at", lambda *_, **__: (files, "bucket"))
    monkeypatch.setattr(bucket_copies, "PAUSES_S", (0.0, 0.0, 0.0))
    yield files
    if request.param == "fsspec" and files.exists("bucket"):
        files.rm("bucket", recursive=True)


def _memory() -> Any:
    """An obstore of this test's own."""
    kind: Any = FsspecStore  # it does not list all that fsspec takes
    return kind("memory", skip_instance_cache=True)


def _checkpoints(folder: Path, *, keep: int = 3) -> StoredBytes:
    return StoredBytes(folder, keep=keep, copies=BucketCopies("s3://bucket", "tiny"))


def _save(folder: Path, steps: range, *, keep: int = 3) -> StoredBytes:
    checkpoints = _checkpoints(folder, keep=keep)
    for step in steps:
        checkpoints.save_bytes(replace(STATE, step=step), f"weights of {step}".encode())
    return checkpoints


def _empty_machine(folder: Path, *, has_key: bool = True) -> Path:
    """Another folder of the same run, with nothing of it but its key."""
    other = folder / "another machine"
    other.mkdir()
    if has_key:
        shutil.copy(folder / "run" / KEY, other / KEY)
    return other


def test_an_empty_machine_goes_on_from_the_newest_copy(tmp_path: Path, bucket: Any) -> None:
    _save(tmp_path / "run", range(1, 5), keep=2)
    assert {path.split("/")[-2] for path in bucket.find(ROOT)} == {"step-000003", "step-000004"}

    newest = _checkpoints(_empty_machine(tmp_path)).newest()

    assert newest is not None
    path, state = newest
    assert (state.step, (path / WEIGHTS).read_bytes()) == (4, b"weights of 4")
    assert not list(path.parent.glob(".unfinished*"))


def test_a_machine_without_the_runs_key_is_asked_to_trust_the_copy(
    tmp_path: Path, bucket: Any
) -> None:
    _save(tmp_path / "run", range(1, 2))

    with pytest.raises(CheckpointError, match="--trust-checkpoint step-000001"):
        _checkpoints(_empty_machine(tmp_path, has_key=False)).newest()


def _flip(bucket: Any, file: str) -> None:
    path = f"{ROOT}/step-000002/{file}"
    content = bytearray(bucket.cat_file(path))
    content[len(content) // 2] ^= 4
    bucket.pipe_file(path, bytes(content))


def _remove(bucket: Any, file: str) -> None:
    bucket.rm(f"{ROOT}/step-000002/{file}")


@pytest.mark.parametrize("file", [WEIGHTS, "state.json", "manifest.json", COMMITTED])
@pytest.mark.parametrize("harm", [_flip, _remove])
def test_a_copy_that_was_changed_or_is_not_whole_is_refused(
    tmp_path: Path, bucket: Any, harm: Callable[[Any, str], None], file: str
) -> None:
    _save(tmp_path / "run", range(1, 3))
    harm(bucket, file)

    newest = _checkpoints(_empty_machine(tmp_path)).newest()

    assert newest is not None
    assert newest[1].step == 1, "the one before"


def test_a_copy_that_a_full_disk_does_not_take_is_removed(
    tmp_path: Path, bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(_self: BucketCopies, _name: str, file: str, folder: Path) -> None:
        (folder / file).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    _save(tmp_path / "run", range(1, 2))
    here = _empty_machine(tmp_path)
    monkeypatch.setattr(BucketCopies, "_fetch_file", fill)

    with pytest.raises(OSError, match="No space left"):
        _checkpoints(here).newest()

    assert not list(here.rglob(".unfinished*"))


def test_a_run_all_of_whose_copies_are_damaged_does_not_begin_anew(
    tmp_path: Path, bucket: Any
) -> None:
    _save(tmp_path / "run", range(2, 3))
    _flip(bucket, WEIGHTS)

    with pytest.raises(CheckpointError, match=r"at least one copy in .* must be intact, got none"):
        _checkpoints(_empty_machine(tmp_path)).newest()


def test_what_a_killed_life_has_not_copied_the_next_one_does(tmp_path: Path, bucket: Any) -> None:
    checkpoints = _save(tmp_path / "run", range(1, 3))
    _remove(bucket, COMMITTED)
    _remove(bucket, WEIGHTS)

    assert checkpoints.newest() is not None

    newest = _checkpoints(_empty_machine(tmp_path)).newest()
    assert newest is not None
    assert newest[1].step == 2


def test_a_copy_of_another_life_does_not_count_while_it_is_replaced(
    tmp_path: Path, bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = _save(tmp_path / "run", range(1, 2))
    seen: list[bool] = []
    put = BucketCopies._put

    def look(copies: BucketCopies, *args: Any) -> None:
        seen.append(bucket.exists(f"{ROOT}/step-000001/{COMMITTED}"))
        put(copies, *args)

    monkeypatch.setattr(BucketCopies, "_put", look)
    checkpoints.save_bytes(replace(STATE, lineage=2), b"others")

    assert seen and not any(seen)
    newest = _checkpoints(_empty_machine(tmp_path)).newest()
    assert newest is not None and newest[1].lineage == 2


def test_a_bucket_that_does_not_answer_is_asked_again_and_then_ends_the_save(
    tmp_path: Path, bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, committed = [], []

    def fail(*_: object, **__: object) -> None:
        asked.append(1)
        raise OSError("away")

    checkpoints = _checkpoints(tmp_path / "run")
    monkeypatch.setattr(bucket, "makedirs", fail)
    checkpoints.begin_save(STATE, stored(b"weights"), None, then=lambda: committed.append(1))  # type: ignore[arg-type]

    with pytest.raises(OSError, match="the copy of a checkpoint cannot be written: away"):
        checkpoints.under_way.wait()

    assert len(asked) == 1 + len(bucket_copies.PAUSES_S)
    assert not committed, "a batch is committed once its copy is there"
    assert checkpoints.all(), "the checkpoint itself is durable"


def test_a_removal_whose_answer_is_lost_is_a_removal(
    tmp_path: Path, bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove, lost = bucket.rm, []

    def remove_and_lose(path: str, **options: Any) -> None:
        remove(path, **options)
        if path.startswith(ROOT) and path not in lost:
            lost.append(path)
            raise OSError("connection closed")

    monkeypatch.setattr(bucket, "rm", remove_and_lose)
    _save(tmp_path / "run", range(1, 3), keep=1)

    assert lost == [f"{ROOT}/step-000001/{COMMITTED}", f"{ROOT}/step-000001"]
    assert not bucket.exists(f"{ROOT}/step-000001")


def test_what_obstore_raises_is_an_error_of_the_system() -> None:
    def fail(*_: object) -> None:
        raise GenericError("refused\nat length")

    files = OSErrorProxy(
        SimpleNamespace(cat_file=fail, open=lambda *_: SimpleNamespace(write=fail))
    )

    with pytest.raises(OSError, match=r"^refused$"):
        files.cat_file("a")
    with pytest.raises(OSError, match=r"^refused$"):
        files.open("a", "wb").write(b"")
    with pytest.raises(FileNotFoundError):
        OSErrorProxy(_memory()).cat_file("a")


def test_a_bucket_needs_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("buffer.record.filesystems.OLDEST", (99, 0))
    with pytest.raises(SettingsError, match=r"must have obstore >= 99.0 .* extra `bucket`"):
        filesystem_at("s3://bucket/folder", setting="learner.checkpoint_url")
