"""Progress of a benchmark on stderr: stdout is for its JSON."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

Say = Callable[[str], None]
"""Takes a line about what has just been measured."""


def say_since(began: float) -> Say:
    """Return a function that prints a line with the seconds since `began`, of the steady clock."""

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:5.0f} s  {text}", file=sys.stderr, flush=True)

    return say
