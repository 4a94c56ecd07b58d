"""Columns in braces in a text, such as `Translate: {english}`: prompts and rubrics have them."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

_BRACES = re.compile(r"\{(\w+)\}")
KEPT = 64  # more than the texts of a run; asked for every row


@lru_cache(KEPT)
def columns_in(text: str) -> frozenset[str]:
    """Name the columns of a text."""
    return frozenset(_BRACES.findall(text))


def fill_in(text: str, value: Callable[[str], str]) -> str:
    """Return a text with the value of each column in its place; other braces stay.

    Example:
        >>> fill_in("{a} + {b} = {?}", {"a": "7", "b": "8"}.__getitem__)
        '7 + 8 = {?}'
    """
    return _BRACES.sub(lambda column: value(column[1]), text)
