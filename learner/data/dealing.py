"""Dealing of a batch's sequences to ranks and microbatches.

All ranks run their j-th microbatch together, layer by layer, so each waits for the one that costs
most: what is dealt alike is not only a rank's sum, but each microbatch over the ranks.

A prompt is computed once for its completions in a microbatch. Keeping them together saves prompts,
but large bundles are dealt less alike, so several sizes of bundles are tried.

Every rank gets the same number of microbatches, some of them perhaps empty.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from learner.model.sequence_cost import SequenceCost

FILLED = 0.97  # of the budget, on average: fuller ones leave no choice, and costs differ more


class Place(NamedTuple):
    """Where a sequence is trained."""

    rank: int
    microbatch: int
    """The j-th of its rank, from 0."""


class Size(NamedTuple):
    """What decides where an episode is trained."""

    prompt: bytes
    """Its tokens; where equal, they are computed once."""
    prompt_tokens: int
    tokens: int
    """Of the completion."""
    scored: int
    """Of these, as many are scored."""


def deal_episodes(
    sizes: Sequence[Size], cost: SequenceCost, *, ranks: int, microbatch_tokens: int
) -> list[Place]:
    """Deal episodes to the microbatches of all ranks, in the bundles that take the least time.

    Args:
        sizes: Of each episode.
        cost: Of a sequence.
        ranks: Number of ranks.
        microbatch_tokens: Most tokens of a microbatch.
    """
    fastest = math.inf
    places: list[Place] = []
    room = microbatch_tokens
    is_cut = False
    while not is_cut:
        bundles = _bundle(sizes, room)
        is_cut = len(bundles) == len(sizes)
        costs = [_cost_of([sizes[row] for row in rows], cost) for rows in bundles]
        tokens = [_tokens_of([sizes[row] for row in rows]) for rows in bundles]
        dealt = deal(tokens, costs, ranks=ranks, microbatch_tokens=microbatch_tokens)
        took = lockstep(dealt, costs)
        if took < fastest:
            fastest = took
            place_of = {row: dealt[n] for n, rows in enumerate(bundles) for row in rows}
            places = [place_of[row] for row in range(len(sizes))]
        if took * ranks <= sum(costs) * (1 + 1e-9):  # no rank waits, and smaller ones cost more
            break
        room = min(room, max(tokens)) * 3 // 4
    return places


def _bundle(sizes: Sequence[Size], room: int) -> list[list[int]]:
    """Put completions of one prompt together while both fit `room`, longest first."""
    rows_of: defaultdict[bytes, list[int]] = defaultdict(list)
    for row in sorted(range(len(sizes)), key=lambda row: (-sizes[row].tokens, row)):
        rows_of[sizes[row].prompt].append(row)
    bundles: list[list[int]] = []
    for rows in rows_of.values():
        open_ones: list[tuple[list[int], int]] = []  # a bundle and its tokens
        for row in rows:
            tokens = sizes[row].tokens
            for n, (bundle, used) in enumerate(open_ones):
                if used + tokens <= room:
                    bundle.append(row)
                    open_ones[n] = bundle, used + tokens
                    break
            else:
                open_ones.append(([row], sizes[row].prompt_tokens + tokens))
        bundles += [bundle for bundle, _ in open_ones]
    return bundles


def _tokens_of(bundle: Sequence[Size]) -> int:
    return bundle[0].prompt_tokens + sum(size.tokens for size in bundle)


def _cost_of(bundle: Sequence[Size], cost: SequenceCost) -> float:
    prompt = bundle[0].prompt_tokens
    return cost(prompt, 0) + sum(cost(size.tokens, size.scored, after=prompt) for size in bundle)


def lockstep(places: Sequence[Place], costs: Sequence[float]) -> float:
    """Time of ranks that wait for one another in every microbatch, in units of cost."""
    sums: defaultdict[Place, float] = defaultdict(float)
    for place, each in zip(places, costs, strict=True):
        sums[place] += each
    dearest: defaultdict[int, float] = defaultdict(float)
    for place, total in sums.items():
        dearest[place.microbatch] = max(dearest[place.microbatch], total)
    return sum(dearest.values())


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
