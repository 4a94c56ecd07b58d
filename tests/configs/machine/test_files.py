"""Modes of files, their number, room on a disk, and folders for unix sockets."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from configs import machine
from configs.durable import private_files
from configs.errors import SettingsError

MIB = 2**20


@pytest.mark.parametrize(
    ("umask", "file", "folder"), [(0o022, 0o640, 0o750), (0, 0o640, 0o750), (0o077, 0o600, 0o700)]
)
def test_files_are_no_wider_than_their_group_and_a_narrower_umask_stays(
    tmp_path: Path, umask: int, file: int, folder: int
) -> None:
    before = os.umask(umask)
    try:
        with private_files():
            (tmp_path / "file").touch()
            (tmp_path / "folder").mkdir()
        assert os.umask(umask) == umask
    finally:
        os.umask(before)

    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == file
    assert stat.S_IMODE((tmp_path / "folder").stat().st_mode) == folder


def test_a_process_may_open_as_many_files_as_its_system_lets_it() -> None:
    program = (
        "import resource; from configs.machine import raise_open_files\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 200)); raise_open_files()\n"
        "print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] >= 200

    said = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[3],
    )

    assert said.stdout.split() == ["200", "200"]


def test_a_disk_is_full_when_nothing_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type(shutil.disk_usage("/"))
    free = [machine.FULL_BYTES]
    monkeypatch.setattr(
        shutil, "disk_usage", lambda _folder: usage(900 * MIB, 900 * MIB - free[0], free[0])
    )

    assert machine.full_disk(tmp_path) is None
    free[0] -= 1
    assert str(machine.full_disk(tmp_path)).startswith(
        "the disk must have room, got 1.00 MiB free of 900; free some space on the disk of "
        f"{tmp_path}"
    )


def test_a_folder_that_is_not_there_has_no_full_disk(tmp_path: Path) -> None:
    assert machine.full_disk(tmp_path / "none") is None


@pytest.fixture
def long_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A TMPDIR of 120 bytes."""
    folder = tmp_path / ("t" * (119 - len(os.fsencode(tmp_path))))
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_a_socket_has_a_path_that_is_short_enough_whatever_tmpdir_is(long_folder: Path) -> None:
    folder = machine.folder_of_sockets(36)

    assert folder != long_folder
    with (
        tempfile.TemporaryDirectory(prefix="nyala-", dir=folder) as place,
        socket.socket(socket.AF_UNIX) as bound,
    ):
        bound.bind(f"{place}/x")


def test_a_short_tmpdir_is_kept_up_to_the_last_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    room = machine.MAX_SOCKET_PATH_BYTES - 1 - len(os.fsencode(tmp_path))
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(f"{tmp_path}/{'x' * room}")

    assert machine.folder_of_sockets(room) == tmp_path
    assert machine.folder_of_sockets(room + 1) != tmp_path


def test_without_a_short_folder_tmpdir_is_named(
    long_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "TEMPORARY", ())

    with pytest.raises(SettingsError, match=r"TMPDIR must be a folder.* at most 70 bytes.* of 120"):
        machine.folder_of_sockets(36)
