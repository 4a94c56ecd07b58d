"""Dealing of a batch's sequences to ranks and microbatches.

All ranks run their j-th microbatch together, layer by layer, so each waits for the one that costs
most: what is dealt alike is not only a rank's sum, but each microbatch over the ranks.

Every rank gets the same number of microbatches, some of them perhaps empty.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

FILLED = 0.97  # of the budget, on average: fuller ones leave no choice, and costs differ more


class Place(NamedTuple):
    """Where a sequence is trained."""

    rank: int
    microbatch: int
    """The j-th of its rank, from 0."""


def deal(
    tokens: Sequence[int], costs: Sequence[float], *, ranks: int, microbatch_tokens: int
) -> list[Place]:
    """Deal sequences to the microbatches of all ranks, within the budget of each.

    The j-th microbatches are filled together: dearest first, each sequence to the rank with the
    least cost so far, while it stays below what the dearest costs, or an equal share of what is
    left if that is more. The rest waits for the microbatches after it.

    Args:
        tokens: Length of each sequence; one longer than the budget gets a microbatch of its own.
        costs: Of each sequence, in any unit.
        ranks: Number of ranks.
        microbatch_tokens: Most tokens of a microbatch.
    """
    places: dict[int, Place] = {}
    left = sorted(range(len(costs)), key=lambda row: (-costs[row], row))
    number = 0
    while left:
        room = FILLED * ranks * microbatch_tokens
        needed = math.ceil(sum(tokens[row] for row in left) / room)
        share = sum(costs[row] for row in left) / (ranks * needed)
        # Of the last ones every sequence is part, if its tokens fit.
        most = max(costs[left[0]], share) if needed > 1 else math.inf
        dealt = _fill(left, tokens, costs, most, ranks=ranks, room=microbatch_tokens)
        places |= {row: Place(rank, number) for row, rank in dealt.items()}
        left = [row for row in left if row not in dealt]
        number += 1
    return [places[row] for row in range(len(costs))]


def _fill(
    rows: Sequence[int],
    tokens: Sequence[int],
    costs: Sequence[float],
    most: float,
    *,
    ranks: int,
    room: int,
) -> dict[int, int]:
    """Fill one microbatch of each rank from `rows`, dearest first; the rank of each that fits."""
    dealt: dict[int, int] = {}
    shortest = min(tokens[row] for row in rows)
    open_ones = [(0.0, rank, room) for rank in range(ranks)]  # a heap: cost so far, rank, room
    for row in rows:
        length = min(tokens[row], room)
        too_full = []
        while open_ones and open_ones[0][0] + costs[row] <= most * (1 + 1e-9):
            cost, rank, free = heapq.heappop(open_ones)
            if length <= free:
                dealt[row] = rank
                if free - length >= shortest:
                    too_full.append((cost + costs[row], rank, free - length))
                break
            too_full.append((cost, rank, free))
        for entry in too_full:
            heapq.heappush(open_ones, entry)
    return dealt
