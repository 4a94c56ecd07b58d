"""The program as it was typed, so that the commands in hints can be pasted.

`nyala` where that is on the path; `./run`, or a path to either, where it was called so.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

from .verb_table import VERBS

VARIABLE = "NYALA_TYPED"
"""Set by `./run` to its own name as it was typed."""

HINT = re.compile(rf"(?<![\w/])nyala(?= (?:{'|'.join(map(re.escape, VERBS))})\b)")


def program() -> str:
    """Return the first word of a command that calls this program again."""
    typed = os.environ.get(VARIABLE)
    if typed:
        return typed
    called = Path(sys.argv[0])
    found = shutil.which("nyala")
    is_on_path = found is not None and called.exists() and Path(found).samefile(called)
    if called.name != "nyala" or is_on_path:
        return "nyala"
    return sys.argv[0]


def as_typed(text: str) -> str:
    """Replace `nyala` in the commands of a text."""
    return HINT.sub(lambda _: program(), text)
