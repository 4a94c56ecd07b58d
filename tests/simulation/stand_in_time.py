"""Time, randomness, sockets and threads of the product's modules, while a simulation runs.

The product reads clocks and draws from the standard library's generator, which is as it should be;
so the simulation takes the place of these names, and no line of the product exists for its sake.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import structlog

from tests.simulation.actor import InlineEnvironment
from tests.simulation.network import Network

EPOCH_S = 1_800_000_000.0
"""Unix seconds at which every simulation begins."""


def _no_sleep(_seconds: float) -> None:
    raise AssertionError("nothing in a simulation may block")


@contextmanager
def stand_in(loop: asyncio.AbstractEventLoop, network: Network, seed: int) -> Iterator[None]:
    """Let the product live in the loop's time, draw from the seed, and speak over the network."""
    state, names = random.getstate(), random.Random(f"{seed} names")
    logging = structlog.get_config()
    with ExitStack() as stack:
        for target, name, replacement in (
            (time, "monotonic", loop.time),
            (time, "time", lambda: EPOCH_S + loop.time()),
            (time, "sleep", _no_sleep),
            (secrets, "token_hex", lambda n=32: f"{names.getrandbits(8 * n):0{2 * n}x}"),
        ):
            stack.enter_context(mock.patch.object(target, name, replacement))
        stack.enter_context(mock.patch("broker.connection.connect_dealer", network.dial))
        stack.enter_context(mock.patch("actors.loop.EnvironmentWorkers", InlineEnvironment))
        # Memory and processor time are of this very process, and no part of a story.
        stack.enter_context(mock.patch("configs.machine.PROCESSES", Path("/proc/none")))
        random.seed(seed)
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
        try:
            yield
        finally:
            structlog.configure(**logging)
            random.setstate(state)
