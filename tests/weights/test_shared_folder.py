"""Private folders in shared memory: access, remains of dead owners, and a full device."""

import errno
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from broker.weights import shared_memory as shared_folder
from broker.weights.shared_memory import SharedFolder
from configs.errors import WeightsError

ROOT = Path(__file__).parents[2]
OWNER = """
import signal, sys
from pathlib import Path
from broker.weights import shared_memory
shared_memory.SHARED_MEMORY = Path(sys.argv[1])
folder = shared_memory.SharedFolder("victim", num_bytes=1, fallback=Path(sys.argv[1]))
print(folder.path, flush=True)
signal.pause()
"""


@pytest.fixture(autouse=True)
def base(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_folder, "SHARED_MEMORY", tmp_path)
    return tmp_path


def test_only_the_owner_may_enter_and_names_cannot_be_guessed(base):
    with (
        SharedFolder("x", num_bytes=1, fallback=base) as one,
        SharedFolder("x", num_bytes=1, fallback=base) as other,
    ):
        assert stat.S_IMODE(one.path.stat().st_mode) == 0o700
        assert len({one.path.name, other.path.name}) == 2
        assert len(one.path.name) >= len("nyala-x-") + 16
    assert not one.path.exists()


def test_the_folder_of_a_killed_owner_is_removed_by_the_next_and_that_of_a_living_one_is_not(base):
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(base)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        folder = Path(owner.stdout.readline().strip())
        SharedFolder("next", num_bytes=1, fallback=base).close()
        assert folder.is_dir()

        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
        SharedFolder("next", num_bytes=1, fallback=base).close()

    assert not folder.exists()


def test_what_does_not_fit_into_shared_memory_goes_to_the_fallback(base):
    free = os.statvfs(base).f_bavail * os.statvfs(base).f_frsize

    with SharedFolder("x", num_bytes=2 * free, fallback=base / "run") as folder:
        assert folder.path.parent == base / "run"


def test_no_room_is_an_error_with_advice(base, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with (
        SharedFolder("x", num_bytes=1, fallback=base) as folder,
        pytest.raises(
            WeightsError, match=r"must be >= 8 bytes, got .*; stop or delete what fills it"
        ),
    ):
        folder.create("weights", 8)


def test_what_does_not_fit_lies_in_the_machines_scratch_folder(base, monkeypatch, tmp_path):
    too_much = 2**60
    with SharedFolder("x", num_bytes=too_much, fallback=base / "run") as folder:
        assert folder.path.parent == base / "run"

    monkeypatch.setenv("NYALA_SCRATCH", str(tmp_path / "scratch"))
    with SharedFolder("x", num_bytes=too_much, fallback=base / "run") as folder:
        assert folder.path.parent == tmp_path / "scratch"
    with SharedFolder("x", num_bytes=1, fallback=base / "run") as folder:
        assert folder.path.parent == base


def test_a_place_that_cannot_be_written_is_named_with_what_to_do(base, tmp_path):
    (tmp_path / "file").touch()

    with pytest.raises(WeightsError, match=r"GiB free, or NYALA_SCRATCH be a folder that can be w"):
        SharedFolder("x", num_bytes=2**60, fallback=tmp_path / "file" / "staging")
