"""Child processes end with their parents, and what they send is read with care."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from configs.child import LENGTH, MalformedFrame, as_frame, die_with_parent, read_frame

ROOT = Path(__file__).parents[2]
CHILD = """
import sys
sys.path.append(sys.argv[1])
from configs.child import die_with_parent
die_with_parent(parent=int(sys.argv[2]) if len(sys.argv) > 2 else None)
print("ready", flush=True)
sys.stdin.read()
"""
PARENT = """
import subprocess, sys
subprocess.run([sys.executable, "-I", "-S", "-c", *sys.argv[1:]])
"""
linux = pytest.mark.skipif(sys.platform != "linux", reason="a signal of Linux")


@linux
def test_a_child_ends_with_the_process_that_started_it():
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD, str(ROOT)],
        stdin=subprocess.PIPE,  # open here: its end is not what ends the child
        stdout=subprocess.PIPE,
    )
    assert parent.stdin is not None and parent.stdout is not None
    with parent.stdin, parent.stdout as printed:
        assert printed.readline() == b"ready\n"

        parent.kill()

        assert printed.read() == b"", "the child holds its output open for as long as it lives"
    parent.wait()


@linux
def test_a_child_whose_parent_ended_before_it_asked_ends_at_once():
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()

    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", CHILD, str(ROOT), str(gone.pid)],
        input=b"",
        capture_output=True,
        check=False,
        timeout=60,
    )

    assert (done.returncode, done.stdout) == (1, b"")
    assert b"the parent of this process has ended" in done.stderr


@linux
def test_a_child_of_a_living_parent_goes_on():
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", CHILD, str(ROOT), str(os.getpid())],
        input=b"",
        capture_output=True,
        check=True,
        timeout=60,
    )

    assert done.stdout == b"ready\n"


@linux
def test_a_signal_that_the_kernel_refuses_is_an_error():
    with pytest.raises(OSError, match="a signal at the parent's end"):
        die_with_parent(signal.NSIG + 1000)


def test_a_program_in_the_sandbox_starts_with_it_and_with_no_heavy_module():
    code = f"import sys; sys.path.append({str(ROOT)!r}); import configs.child; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, check=True, timeout=60
    )

    assert not {"signal", "enum", "typing", "pathlib", "re"} & {*done.stdout.decode().split()}


def test_frames_come_as_they_went_and_then_none():
    pipe = io.BytesIO(as_frame(b"one") + as_frame(b""))

    assert [read_frame(pipe.read) for _ in range(3)] == [b"one", b"", None]


@pytest.mark.parametrize("left", range(1, len(as_frame(b"one"))))
def test_a_frame_that_is_cut_is_the_end(left: int):
    assert read_frame(io.BytesIO(as_frame(b"one")[:left]).read) is None


def test_a_length_that_nobody_sends_is_refused_before_it_is_read():
    pipe = io.BytesIO(LENGTH.pack(11) + bytes(11))

    with pytest.raises(MalformedFrame, match="a frame of 11 bytes"):
        read_frame(pipe.read, max_bytes=10)
    assert pipe.tell() == LENGTH.size
