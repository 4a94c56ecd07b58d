"""Lua scripts by name: the files of `lua/`, each behind the libraries it includes.

The first line of a file may name libraries of `lua/lib`:

    --- @include keys, units

Each library comes once, after those that it includes itself. The result is a complete script, which
Redis keeps by its hash. A script has few functions that it does not need, because Redis creates all
functions of a script at every call.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

LUA = Path(__file__).parents[1] / "lua"
FILES = {path.stem: path for path in LUA.rglob("*.lua")}

_INCLUDE = re.compile(r"--- @include (\w+(?:, \w+)*)\n")


@dataclass(frozen=True, slots=True)
class Script:
    """A complete script and the name under which Redis keeps it."""

    source: str
    sha: str


@cache
def load_script(name: str) -> Script:
    """Read a script of the `lua` folder with its libraries."""
    return make_script(assemble(name, FILES))


def load_all() -> None:
    """Read every script now, while this process can still open files for them."""
    for name, path in FILES.items():
        if path.parent.name != "lib":
            load_script(name)


def make_script(source: str) -> Script:
    """Make a script of complete source text."""
    sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()  # Redis' own name for it
    return Script(source, sha)


def assemble(name: str, files: Mapping[str, Path]) -> str:
    """Put a file behind the libraries that it includes, directly or through other libraries.

    Raises:
        ValueError: An include names no library, is malformed, or leads back to its own file.
    """
    texts: dict[str, str] = {}
    includes: dict[str, list[str]] = {}
    waiting = [name]
    while waiting:
        part = waiting.pop()
        if part not in texts:
            texts[part] = files[part].read_text(encoding="utf-8")
            includes[part] = _included(part, texts[part], files)
            waiting += includes[part]
    return "\n".join(texts[part] for part in TopologicalSorter(includes).static_order())


def _included(name: str, text: str, files: Mapping[str, Path]) -> list[str]:
    """Names of the libraries in a file's first line."""
    header = _INCLUDE.match(text)
    libraries = header[1].split(", ") if header else []
    if text.count("@include") != bool(header):
        raise ValueError(f"{name}.lua must have its include in line 1: '--- @include NAME, NAME'")
    for library in libraries:
        if library not in files or files[library].parent.name != "lib":
            raise ValueError(f"{name}.lua may include only libraries of lua/lib, got {library!r}")
    return libraries


LoadScript = Callable[[str], Script]
"""Returns a script by its name; tests pass functions that return broken ones."""
