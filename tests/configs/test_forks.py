"""When a process may be forked, and what a fork lets go of: real processes, threads and files."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from configs.forks import fault_of_forks, files_of_others, has_met_cuda
from tests.waiting import is_alive, wait_until

ROOT = Path(__file__).parents[2]
SLEEPING = """
import ctypes
libc = ctypes.CDLL(None)
def begin(what):
    libc.pthread_create(ctypes.byref(ctypes.c_ulong()), None, what, None)
"""
FORKS = """
import fcntl, json, os, signal, socket, sys, threading
from configs.forks import forks_let_go

listener = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(listener.getsockname(), timeout=20)
accepted, _ = listener.accept()
waker, woken = socket.socketpair()
for each in (waker, woken):
    each.setblocking(False)
signal.set_wakeup_fd(waker.fileno())
lock = open(sys.argv[1], "w")
fcntl.flock(lock, fcntl.LOCK_EX)
read_only = open(sys.argv[1])
ready, done = os.pipe()

def begin():
    pid = os.fork()
    if not pid:
        signal.signal(signal.SIGUSR1, lambda *_: os.write(done, b"2"))
        os.write(done, b"1")
        while True:
            signal.pause()
    return pid

found = {}
def work():  # as an engine's thread does
    with forks_let_go():
        found["let_go"] = begin()
    os.read(ready, 1)
    os.kill(found["let_go"], signal.SIGUSR1)
    os.read(ready, 1)
    accepted.close()
    found["told"] = client.recv(1) == b""
    lock.close()
    fcntl.flock(os.open(sys.argv[1], os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        found["woken"] = woken.recv(9).hex()
    except BlockingIOError:
        found["woken"] = ""
    found["files"] = sorted({os.readlink(f"/proc/{found['let_go']}/fd/{n}").partition(":")[0]
        for n in map(int, os.listdir(f"/proc/{found['let_go']}/fd")) if n > 2})
    client_2 = socket.create_connection(listener.getsockname(), timeout=20)
    kept, _ = listener.accept()
    found["keeps"] = begin()  # outside: whatever it is for, it has what a fork has
    os.read(ready, 1)
    kept.close()
    client_2.settimeout(0.2)
    try:
        found["kept"] = client_2.recv(1) != b""
    except TimeoutError:
        found["kept"] = True
    os.kill(found["keeps"], signal.SIGKILL)
    print(json.dumps(found), flush=True)
    threading.Event().wait()

worker = threading.Thread(target=work, daemon=True)
worker.start()
worker.join()
"""


def run(program: str, *arguments: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_thread_of_pythons_forbids_forks_by_its_name() -> None:
    ends = threading.Event()
    thread = threading.Thread(target=ends.wait, name="reads-mail")
    thread.start()
    try:
        assert "Python's 'reads-mail' (S)" in fault_of_forks()
    finally:
        ends.set()
        thread.join()


@pytest.mark.parametrize(
    ("thread", "says"), [("begin(libc.pause)", ""), ("begin(libc.busy)", "other threads: python")]
)
def test_a_thread_of_a_library_forbids_forks_while_it_works(
    thread: str, says: str, tmp_path: Path
) -> None:
    source = tmp_path / "busy.c"
    source.write_text('void *busy(void *_) { for (;;) __asm__ volatile(""); }\n')
    library = tmp_path / "busy.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    program = (
        SLEEPING
        + f"libc.busy = ctypes.CDLL({str(library)!r}).busy\n"
        + thread
        + "\nfrom configs.forks import fault_of_forks\nprint(fault_of_forks())"
    )

    said = run(program).strip()

    assert (says in said) if says else said == ""


@pytest.mark.parametrize(("answer", "met"), [(0, True), (100, True), (3, False)])
def test_a_process_knows_whether_it_has_met_cuda(
    monkeypatch: pytest.MonkeyPatch, answer: int, met: bool
) -> None:
    """`CUDA_SUCCESS`, no device, not initialised: as CUDA's driver answers."""
    driver = SimpleNamespace(cuDeviceGetCount=lambda _: answer)
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: driver)

    assert has_met_cuda() is met


def test_blas_has_its_threads_and_is_forked_with_what_it_computes() -> None:
    program = (
        "import os, numpy\n"
        "from configs.forks import fault_of_forks, other_threads\n"
        "a = numpy.ones((600, 600)); a @ a\n"
        "print(len(other_threads()) > 0, fault_of_forks() == '', flush=True)\n"
        "if not os.fork():\n"
        "    print((a @ a).sum() == 600**3, flush=True)\n"
        "    os._exit(0)\n"
        "os.wait()\n"
    )

    assert run(program, OPENBLAS_NUM_THREADS="3") == "True True\nTrue\n"


def test_files_of_others_are_what_somebody_waits_for(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    elsewhere = subprocess.Popen(["sleep", "60"], stdout=subprocess.PIPE)
    try:
        assert elsewhere.stdout is not None
        with (tmp_path / "written").open("w") as written, (tmp_path / "written").open() as read:
            found = files_of_others()
            assert {written.fileno(), elsewhere.stdout.fileno()} <= {*found}
            assert not {0, 1, 2, reader, writer, read.fileno()}.intersection(found)
    finally:
        elsewhere.kill()
        elsewhere.communicate()
        os.close(reader)
        os.close(writer)


def test_a_fork_lets_go_and_ends_with_its_parent(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", FORKS, str(tmp_path / "lock")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    found = json.loads(parent.stdout.readline())

    assert found["told"], "the other side of a closed connection is told so"
    assert found["woken"] == "", "a signal to the fork is none to its parent's event loop"
    assert {each.split("/")[0] for each in found["files"]} <= {"", "pipe"}
    assert not any(each.startswith("socket") for each in found["files"])
    assert found["kept"], "a fork outside keeps a connection open: what this is for"
    assert is_alive(found["let_go"])

    parent.kill()
    parent.communicate()

    wait_until(lambda: not is_alive(found["let_go"]))
