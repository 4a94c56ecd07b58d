"""The order of writes, syncs and renames, and the modes of what is made."""

import errno
import os
import stat
from pathlib import Path

import pytest

from configs import durable
from configs.secrets import write_secret
from learner.checkpointing.folders import write_lineages


class RecordingDisk(durable.Disk):
    """The real disk; remembers what was done in which order."""

    def __init__(self, root):
        self.root = root
        self.done = []

    def _note(self, what, path):
        self.done.append((what, str(path.relative_to(self.root))))

    def write(self, path, content, mode=0o666):
        self._note("write", path)
        super().write(path, content, mode)

    def make_folder(self, path, mode=0o777):
        self._note("make", path)
        super().make_folder(path, mode)

    def sync(self, path):
        self._note("sync", path)
        super().sync(path)

    def rename(self, source, target):
        self._note("rename", target)
        super().rename(source, target)


@pytest.fixture
def disk(tmp_path, monkeypatch):
    recording = RecordingDisk(tmp_path)
    monkeypatch.setattr(durable, "DISK", recording)
    return recording


def test_a_file_is_synced_before_it_has_its_name_and_its_folder_after(disk, tmp_path):
    write_lineages(tmp_path, {1: 2})

    assert [what for what, _ in disk.done] == ["write", "sync", "rename", "sync"]
    assert disk.done[2:] == [("rename", "lineages.json"), ("sync", ".")]


def test_what_a_full_disk_does_not_take_whole_is_removed(tmp_path, monkeypatch):
    def fill(path, content, mode=0o666):
        path.write_bytes(content[:4])
        raise OSError(errno.ENOSPC, "No space left on device")

    durable.replace_file(tmp_path / "state", "before")
    monkeypatch.setattr(durable.DISK, "write", fill)

    with pytest.raises(OSError, match="No space left"):
        durable.replace_file(tmp_path / "state", "after and longer")

    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    assert (tmp_path / "state").read_text() == "before"


def test_a_sync_leaves_no_file_open(tmp_path):
    folder = Path("/proc/self/fd")
    before = len(list(folder.iterdir()))

    for _ in range(3):
        durable.Disk().sync(tmp_path)

    assert len(list(folder.iterdir())) == before


def test_a_new_folder_is_synced_into_its_parent(disk, tmp_path):
    durable.make_folder(tmp_path / "a" / "b")

    assert disk.done == [("make", "a"), ("sync", "."), ("make", "a/b"), ("sync", "a")]


def test_a_tree_is_synced_from_its_files_to_its_name(disk, tmp_path):
    (tmp_path / "t" / "u").mkdir(parents=True)
    (tmp_path / "t" / "u" / "f").write_text("x")

    durable.sync_tree(tmp_path / "t")
    durable.move(tmp_path / "t", tmp_path / "v")

    synced = [path for what, path in disk.done if what == "sync"]
    assert synced == ["t/u", "t/u/f", "t", "."]


def test_what_a_crash_left_behind_is_written_over(tmp_path):
    path = tmp_path / "f"
    durable.replace_file(path, "a")
    path.with_name(f".f.{os.getpid()}").write_text("torn")

    durable.replace_file(path, b"b")

    assert path.read_text() == "b"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_a_secret_is_private_from_its_first_moment(disk, tmp_path, monkeypatch):
    modes = []
    write = disk.write

    def look(path, content, mode=0o666):
        write(path, content, mode)
        modes.append(stat.S_IMODE(path.stat().st_mode))

    monkeypatch.setattr(disk, "write", look)

    write_secret(tmp_path / "s", "x")

    assert modes == [0o600]


def test_a_private_folder_is_closed_even_if_it_was_open(tmp_path):
    open_folder = tmp_path / "open"
    open_folder.mkdir(mode=0o755)

    durable.make_private_folder(open_folder)
    durable.make_private_folder(tmp_path / "new")

    assert stat.S_IMODE(open_folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
