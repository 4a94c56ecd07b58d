"""The generators that a process shares, `random`'s and numpy's, as one episode sees them.

Many a game draws its secret with `random.choice`. Here each episode has a state of these generators
of its own, which begins with the seed of its item: the item is the same on every actor, and so is
what follows the same texts, although episodes take turns and threads share the process.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

LOCK = threading.RLock()  # they are shared by all threads


class _State(NamedTuple):
    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> _State:
        return cls(random.getstate(), np.random.get_state())  # noqa: NPY002 - the shared one is meant

    def restore(self) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002 - as above

    def equals(self, other: _State) -> bool:
        _, keys, *place = self.numpy
        _, other_keys, *other_place = other.numpy
        same_numpy = place == other_place and bool((keys == other_keys).all())
        return same_numpy and self.python == other.python


class SharedGenerators:
    """Their state for one episode.

    An episode whose first call draws nothing from them is left alone afterwards: its calls need not
    wait for those of others.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._state: _State | None = None
        self._is_used = True

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Carry out a call of the episode with its own state."""
        if not self._is_used:
            yield
            return
        with LOCK:
            outside = _State.now()
            before = self._begin()
            try:
                yield
            finally:
                after = _State.now()
                outside.restore()
                self._is_used = self._state is not None or not after.equals(before)
                self._state = after

    def _begin(self) -> _State:
        if self._state is None:
            random.seed(self._seed)
            np.random.seed(self._seed)  # noqa: NPY002 - the shared one is meant
        else:
            self._state.restore()
        return _State.now()
