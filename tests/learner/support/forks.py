"""Processes that torch and transformers are imported in already: importing them takes seconds.

One server forks those of all tests of a pytest process; it starts with the first.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from collections.abc import Callable
from contextlib import suppress

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "torch._dynamo",  # sharding imports it
        "torch.distributed.fsdp",
        "tests.learner.support.lives.killed_save",
        "tests.weights.support.actor_process",
    ]
)


def run_in_fork(target: Callable[..., None], *arguments: object, within_s: float) -> None:
    """Call a function in a fork, which may fork more of them; it must return in time."""
    process = FORKS.Process(target=_call, args=(target, arguments))
    process.start()
    try:
        process.join(within_s)
        assert process.exitcode == 0
    except BaseException:
        assert process.pid is not None
        with suppress(ProcessLookupError):  # all have ended
            os.killpg(process.pid, signal.SIGKILL)  # one of its forks may wait for another for long
        process.join()
        raise


def _call(target: Callable[..., None], arguments: tuple[object, ...]) -> None:
    gc.freeze()  # a search for garbage would copy the server's pages
    os.setsid()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    target(*arguments)
