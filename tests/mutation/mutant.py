"""A mutant: one small change of a source file that a test should notice."""

from __future__ import annotations

from typing import NamedTuple

DROPPED = "dropped line"


class Mutant(NamedTuple):
    """Replacement of the characters [start, end) of a file."""

    file: str
    """Path from the root of the checkout."""
    start: int
    end: int
    new: str
    kind: str
    """`comparison`, `operator`, `constant`, `dropped line` or `swapped arguments`."""

    def apply(self, source: str) -> str:
        """Return the changed source."""
        return source[: self.start] + self.new + source[self.end :]

    def old_line(self, source: str) -> str:
        """Return the line that changes, as it is; the first if there are several."""
        return self._line(source)

    def new_line(self, source: str) -> str:
        """Return the line as the mutant has it; empty if it is dropped."""
        return "" if self.kind == DROPPED else self._line(self.apply(source))

    def number(self, source: str) -> int:
        """Return the number of the line, from 1."""
        return source.count("\n", 0, self.start) + 1

    def _line(self, source: str) -> str:
        begin = source.rfind("\n", 0, self.start) + 1
        end = source.find("\n", self.start)
        return source[begin : None if end < 0 else end].strip()
