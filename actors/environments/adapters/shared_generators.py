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
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

NUMPY: Any = import_module("numpy.random") if find_spec("numpy") else None
"""An environment host may have none."""

LOCK = threading.RLock()  # they are shared by all threads


class _State(NamedTuple):
    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> _State:
        return cls(random.getstate(), NUMPY and NUMPY.get_state())

    def restore(self) -> None:
        random.setstate(self.python)
        if NUMPY:
            NUMPY.set_state(self.numpy)

    def equals(self, other: _State) -> bool:
        if self.python != other.python or not NUMPY:
            return bool(self.python == other.python)
        _, keys, *place = self.numpy
        _, other_keys, *other_place = other.numpy
        return place == other_place and bool((keys == other_keys).all())


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
            if NUMPY:
                NUMPY.seed(self._seed)
        else:
            self._state.restore()
        return _State.now()
