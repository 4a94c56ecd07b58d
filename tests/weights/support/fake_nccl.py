"""A stand-in for `ProcessGroupNCCL`, which this build of torch lacks: gloo behind its calls.

What it shares with NCCL, as the headers of torch 2.13 have it: no member talks to another before
the first broadcast, which meets all of them within the communicator's deadline; each work is waited
for with a deadline; `abort` cuts a member off, and ends its waits. That NCCL keeps them is not
shown by it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from torch import distributed
from torch.distributed import ProcessGroupGloo

from actors.engine.weights import group as receiving
from learner.weights import group as sending


class FakeWork:
    """A collective under way: an abort of its group from any thread ends a wait for it."""

    def __init__(self, group: FakeNccl, work: Any) -> None:
        self._group = group
        self._work = work

    def wait(self, timeout: timedelta) -> None:
        deadline = time.monotonic() + timeout.total_seconds()
        while not self._work.is_completed():
            if self._group.is_aborted or time.monotonic() > deadline:
                raise RuntimeError("aborted" if self._group.is_aborted else "timed out")
            time.sleep(0.001)
        self._work.wait()


class FakeNccl:
    """One member."""

    made: ClassVar[list[FakeNccl]] = []

    class Options:
        def __init__(self) -> None:
            self.config = SimpleNamespace(blocking=1)
            self._timeout = timedelta(minutes=30)

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        self._meeting = (store, rank, size)
        self._gloo: Any = None
        self._lock = threading.Lock()
        self.options = options
        self.is_aborted = False
        self.made.append(self)

    def broadcast(self, tensors: list[Any], options: Any) -> Any:
        with self._lock:
            if self.is_aborted:
                raise RuntimeError("aborted")
            self._gloo = self._gloo or self._meet()
            return FakeWork(self, self._gloo.broadcast(tensors, options))  # begins, and returns

    def abort(self) -> None:
        with self._lock:
            self.is_aborted, gloo, self._gloo = True, self._gloo, None
        del gloo  # which closes its connections, and waits for what is under way

    def _meet(self) -> Any:
        assert self.options.config.blocking == 0, "a blocking communicator waits for ever"
        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=float(os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"]))
        return gloo(*self._meeting, options)


@contextmanager
def fake_nccl() -> Iterator[list[FakeNccl]]:
    """Let groups of backend `nccl` be of `FakeNccl`, on the CPU; yields its members."""
    FakeNccl.made.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "ProcessGroupNCCL", FakeNccl, raising=False)
        for module in (sending, receiving):
            patch.setitem(module.DEVICES, "nccl", "cpu")
        for name in ("TORCH_NCCL_NONBLOCKING_TIMEOUT", "TORCH_NCCL_ASYNC_ERROR_HANDLING"):
            patch.setenv(name, "")  # restored afterwards
            patch.delenv(name)
        yield FakeNccl.made
