"""Turns in the log of a live agent's tokens, and bodies in the log of its calls.

Only the form of the logs is read here; what they say is read in `agent_rollout.py`. No I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from broker.protocol.conversation_messages import StoredCall
from buffer.record.episode import Completion

from .rollout import ReplayMismatch


@dataclass(frozen=True, slots=True)
class StoredTurn:
    """A turn as the log shows it."""

    parent: int | None
    """Tokens of the log that its context follows: 0 = the prompt, None = nothing."""
    begin: int
    stretches: list[tuple[int, int]]
    """Its sampled tokens."""


def stored_turns(completion: Completion) -> list[StoredTurn]:
    """Cut a log into its turns, in the order of their calls.

    Raises:
        ReplayMismatch: It is not the log of a live agent.
    """
    mask, parents = completion.loss_mask, dict(completion.branches)
    length = len(mask)
    observed = np.flatnonzero((mask[1:] == 0) & (mask[:-1] == 1)) + 1
    cuts = sorted({0, *parents, *observed.tolist(), length})
    turns: list[StoredTurn] = []
    by_end: dict[int, StoredTurn] = {}
    for start, stop in pairwise(cuts):
        parent = parents.get(start, start)
        sampled = start + int(np.argmax(mask[start:stop])) if mask[start:stop].any() else stop
        if sampled > start or not parent:
            turn = StoredTurn(parent, start, [])
            turns.append(turn)
        elif (earlier := by_end.pop(parent, None)) is not None:
            turn = earlier
        else:
            raise ReplayMismatch(f"token {start} of its log follows none of its turns")
        turn.stretches.append((sampled, stop))
        by_end[stop] = turn
    if length and not mask[0]:
        raise ReplayMismatch("its log must begin with a turn")
    return turns


def place_on_path(stretches: Sequence[tuple[int, int]], count: int) -> int:
    """Return the place in the log behind the first `count` tokens of a path; 0 = of none."""
    for start, stop in stretches:
        if count <= stop - start:
            return start + count if count else 0
        count -= stop - start
    return 0


@dataclass(slots=True)
class CallBodies:
    """Calls of a conversation, each as what follows the beginning of an earlier one."""

    calls: list[StoredCall] = field(default_factory=list)

    def body(self, number: int) -> bytes:
        """Return the bytes of a call."""
        tails: list[bytes] = []
        wanted: int | None = None  # bytes; None = all
        while number and wanted != 0:
            call = self.calls[number - 1]
            if wanted is None:
                tails.append(call.tail)
            elif wanted > call.keep:
                tails.append(call.tail[: wanted - call.keep])
            wanted = call.keep if wanted is None else min(wanted, call.keep)
            number = call.parent
        return b"".join(reversed(tails))
