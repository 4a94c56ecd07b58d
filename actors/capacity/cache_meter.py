"""The KV cache of an engine, as its scheduler reports it with every step.

The engine's thread records, the event loop reads: each value is replaced as a whole.
"""

from __future__ import annotations

from .batch_size import Memory


class CacheMeter:
    """Steps in, `memory` out."""

    def __init__(self) -> None:
        self.memory: Memory | None = None
        """None before the first step."""
        self._evicted = 0

    def record(self, used: float, evicted: int) -> None:
        """Take a step.

        Args:
            used: Share of the cache.
            evicted: Episodes that lost their cache in this step.
        """
        self._evicted += evicted
        self.memory = Memory(used, self._evicted)
