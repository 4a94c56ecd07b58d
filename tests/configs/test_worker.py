"""Worker threads: whatever ends one is kept, logged and raised to its owner."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import pytest

from configs.errors import StoreError
from configs.worker import Worker


def failing(error: BaseException) -> Worker:
    def fail() -> None:
        raise error

    return Worker(fail, name="failing").start()


@pytest.mark.parametrize("error", [StoreError("away"), RuntimeError("a bug"), OSError("gone")])
def test_whatever_ends_a_worker_is_raised_by_join_and_by_every_check(error):
    worker = failing(error)

    with pytest.raises(type(error), match=str(error)):
        worker.join(10.0)
    with pytest.raises(type(error), match=str(error)):
        worker.raise_if_failed()
    assert not worker.is_alive


def test_a_worker_that_returns_raises_nothing():
    done = threading.Event()
    worker = Worker(done.set, name="fine").start()

    worker.join(10.0)
    worker.raise_if_failed()

    assert done.is_set()


def test_a_running_worker_is_alive_and_join_gives_up_at_its_timeout():
    go_on = threading.Event()
    worker = Worker(go_on.wait, name="waiting").start()

    worker.join(0.01)

    assert worker.is_alive
    go_on.set()
    worker.join(10.0)
    assert not worker.is_alive


def test_a_worker_that_was_never_started_can_be_joined():
    Worker(lambda: None, name="idle").join()


def test_a_worker_may_join_itself():
    seen: list[str] = []

    def join_itself() -> None:
        worker.join()
        seen.append("went on")

    worker = Worker(join_itself, name="itself")

    worker.start().join(10.0)

    assert seen == ["went on"]


@pytest.mark.parametrize(
    "start",
    [
        "threading.Thread(target=fail, name='of-a-library').start()",
        "Worker(fail, name='of-a-library').start()",
    ],
)
def test_a_dead_thread_leaves_one_line_of_json(start):
    program = (
        "import threading\n"
        "from configs.logging import configure_logging\n"
        "from configs.worker import Worker\n"
        "configure_logging('learner')\n"
        "def fail(): raise RuntimeError('a bug')\n"
        f"{start}\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60
    )

    (line,) = done.stderr.splitlines()
    told = json.loads(line)
    assert told["level"] == "error"
    assert told["thread"] == "of-a-library"
    assert "RuntimeError: a bug" in told["exception"]
