"""The learner's tests run as the only rank of a process group, once for the session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch import distributed as dist

from learner.ranks import Ranks, join


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """This process alone, on the CPU."""
    alone = join("cpu", threads=1)
    yield alone
    if dist.is_initialized():  # an engine that closes in this process ends its groups as well
        alone.leave()
