"""Dense rewards: credit for a part of the answer, so that a policy that is never right learns."""

from __future__ import annotations


def position_share(text: str, answer: str) -> float:
    """Share of positions at which `text` agrees with `answer`, over the longer one; 1 iff equal.

    Example:
        >>> position_share("cbx", "cba")
        0.6666666666666666
    """
    longest = max(len(text), len(answer))
    if longest == 0:
        return 1.0
    return sum(a == b for a, b in zip(text, answer, strict=False)) / longest
