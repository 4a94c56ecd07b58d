"""The number of episodes that an actor may have at a time."""

from __future__ import annotations


class Room:
    """A bound on episodes, generated or waiting for their environment.

    Args:
        most: Of them; may change while the actor works.
        group_size: Of the run.
    """

    def __init__(self, most: int, *, group_size: int) -> None:
        self.most = most
        self._group_size = group_size

    @property
    def full_from(self) -> int:
        """From this number on none is asked for.

        Whole groups come together where they fit, and share their prompt in the prefix cache.
        """
        return self.most - max(1, min(self._group_size, self.most // 4)) + 1
