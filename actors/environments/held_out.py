"""Held-out items: a tenth of all questions, chosen by the question itself.

An item is held out iff the hash of its question falls into one bucket of ten. Training skips these
and evaluation takes only these, so the two never share a question, however small the space of
questions is and whatever seeds the runs have. Probing is deterministic: every process finds the
same item for an index.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TypeVar

from configs.errors import SettingsError

BUCKETS = 10
MAX_PROBES = 2000  # at one bucket of ten, missing this often by chance has a probability of 1e-92
STRIDE = 7_368_787  # a prime, and far from 0 modulo round sizes: neighbours' probes never meet

T = TypeVar("T")


def is_held_out(question: str) -> bool:
    """Return whether a question belongs to evaluation; the same answer in every process."""
    digest = hashlib.blake2b(question.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % BUCKETS == 0


def probe(
    index: int, make: Callable[[int], T], question: Callable[[T], str], *, held_out: bool
) -> T:
    """Return the item of `index` that lies on the wanted side of the split.

    Args:
        index: Which item.
        make: Makes the candidate of a number; must be deterministic.
        question: The text of a candidate that decides its side.
        held_out: The wanted side.

    Raises:
        SettingsError: No candidate lies there: the space of questions is too small to be split.
    """
    for attempt in range(MAX_PROBES):
        candidate = make(index + attempt * STRIDE)
        if is_held_out(question(candidate)) == held_out:
            return candidate
    side = "held-out" if held_out else "training"
    raise SettingsError(
        f"run.environment_settings must leave some {side} questions, got none among {MAX_PROBES} "
        "items; make the task larger, for example with longer words or a wider range of numbers"
    )
