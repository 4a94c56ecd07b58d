"""The Lua scripts: found in `lua/`, put together, known by their SHA-1.

Every script is a body behind the same preludes: complete in itself, so Redis can keep it by
its hash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_FILES = {path.stem: path for path in (Path(__file__).parents[1] / "lua").rglob("*.lua")}
_PRELUDES = ("keys", "units", "tasks", "withdrawal", "replay")


@dataclass(frozen=True, slots=True)
class Script:
    """A complete script and the name under which Redis keeps it."""

    source: str
    sha: str


@cache
def load_script(name: str) -> Script:
    """Read a script of the `lua` folder with its preludes."""
    parts = (_FILES[part].read_text(encoding="utf-8") for part in (*_PRELUDES, name))
    return make_script("\n".join(parts))


def make_script(source: str) -> Script:
    """Make a script of complete source text."""
    sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()  # Redis' own name for it
    return Script(source, sha)


LoadScript = Callable[[str], Script]
"""Where a store gets its scripts; tests put broken ones in."""
