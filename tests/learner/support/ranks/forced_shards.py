"""FSDP2 where one rank would do without it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from learner.model import policy


@contextmanager
def forced_shards() -> Iterator[None]:
    """Shard what is made within, on one rank too."""
    with (
        mock.patch.object(policy, "stays_whole", return_value=False),
        mock.patch.object(policy, "narrows", return_value=False),
    ):
        yield
