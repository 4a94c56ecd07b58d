"""FSDP2 where one rank would do without it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from unittest import mock

from learner.model import policy


def forced_shards() -> AbstractContextManager[object]:
    """Shard what is made within, on one rank too."""
    return mock.patch.object(policy, "stays_whole", return_value=False)
