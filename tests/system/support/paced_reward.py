"""A reward that takes a while, so that a quick machine does not end a run at once."""

from __future__ import annotations

import time

CALL_S = 0.2


def paced(completions: list[str], **_: object) -> list[float]:
    """Score nothing, slowly."""
    time.sleep(CALL_S)
    return [0.0] * len(completions)
