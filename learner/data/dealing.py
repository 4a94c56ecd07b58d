"""Dealing of a batch's sequences to ranks and microbatches.

Called by `batch.py` on rank 0, and by a warm start. All ranks run their j-th microbatch together,
layer by layer, so each waits for the one that costs most: not only the sums of the ranks are
balanced, but each microbatch over the ranks.

A prompt is computed once for its completions in a microbatch. Keeping them together saves prompts,
but large bundles are dealt less alike, so several sizes of bundles are tried. They also leave gaps:
where these make more than one microbatch too many, episodes of later bundles fill them.

Every rank gets the same number of microbatches, some of them perhaps empty.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Self

from learner.model.sequence_cost import SequenceCost

SLACK = 1.05  # of the least time, for fewer microbatches: where prompts are long, gaps are cheaper
FILLED = 0.97  # of the budget, on average: fuller ones leave no choice, and costs differ more


class SequencePlacement(NamedTuple):
    """The rank and the microbatch that train a sequence."""

    rank: int
    microbatch: int
    """Index of the microbatch on its rank, from 0."""


class Size(NamedTuple):
    """The sizes of an episode that decide where it is trained."""

    prompt: bytes
    """Tokens of the prompt; equal prompts are computed once."""
    prompt_tokens: int
    tokens: int
    """Tokens of the completion."""
    scored: int
    """Tokens of the completion that are scored."""


class Bundle(NamedTuple):
    """Episodes of one prompt that are trained together; the dearest bundle is the least."""

    negative_cost: float
    rows: Sequence[int]
    tokens: int

    @classmethod
    def from_rows(cls, rows: Sequence[int], sizes: Sequence[Size], cost: SequenceCost) -> Self:
        """Make a bundle and compute its cost; the prompt counts once."""
        prompt = sizes[rows[0]].prompt_tokens
        completions = [(sizes[row].tokens, sizes[row].scored) for row in rows]
        took = cost(prompt, 0) + sum(cost(*completion, after=prompt) for completion in completions)
        return cls(-took, rows, prompt + sum(tokens for tokens, _ in completions))


def deal_episodes(
    sizes: Sequence[Size], cost: SequenceCost, *, ranks: int, microbatch_tokens: int
) -> list[SequencePlacement]:
    """Deal episodes to the microbatches of all ranks, in the bundles that take the least time.

    Args:
        sizes: Size of each episode.
        cost: Cost of a sequence.
        ranks: Number of ranks.
        microbatch_tokens: Most tokens of a microbatch; a longer episode gets one of its own.

    Returns:
        The place of each episode, in their order.
    """
    if not sizes:
        return []
    deals: list[tuple[int, float, list[SequencePlacement]]] = []
    cheapest = least = math.inf
    prompts = {size.prompt: size.prompt_tokens for size in sizes}
    tokens = sum(prompts.values()) + sum(size.tokens for size in sizes)
    enough = math.ceil(tokens / (ranks * microbatch_tokens)) + 1
    room = budget = microbatch_tokens
    is_cut = False
    while not is_cut:
        bundles = sorted(Bundle.from_rows(rows, sizes, cost) for rows in _bundle(sizes, room))
        is_cut = len(bundles) == len(sizes)
        for is_tight in (False, True):
            dealt = _deal_bundles(sizes, bundles, cost, ranks, budget, is_tight=is_tight)
            costs = _weigh(dealt, sizes, cost)
            too_many = max(0, 1 + max(place.microbatch for place in dealt) - enough)
            took = lockstep(list(costs), list(costs.values()))
            deals.append((too_many, took, dealt))
            cheapest = min(cheapest, took)
            if not is_tight:
                least = sum(costs.values()) / ranks  # smaller bundles repeat more prompts
            if not too_many:
                break
        waits = took * ranks > sum(costs.values()) * (1 + 1e-9)
        if (not too_many and not waits) or least > SLACK * cheapest:
            break
        room = min(room, max(bundle.tokens for bundle in bundles)) * 3 // 4
    return min(deal for deal in deals if deal[1] <= SLACK * cheapest)[2]


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


def _weigh(
    places: Sequence[SequencePlacement], sizes: Sequence[Size], cost: SequenceCost
) -> dict[SequencePlacement, float]:
    """Return the cost of each microbatch, in which a prompt counts once."""
    costs: defaultdict[SequencePlacement, float] = defaultdict(float)
    prompts: set[tuple[SequencePlacement, bytes]] = set()
    for place, size in zip(places, sizes, strict=True):
        if (place, size.prompt) not in prompts:
            prompts.add((place, size.prompt))
            costs[place] += cost(size.prompt_tokens, 0)
        costs[place] += cost(size.tokens, size.scored, after=size.prompt_tokens)
    return costs


def _deal_bundles(
    sizes: Sequence[Size],
    bundles: Sequence[Bundle],
    cost: SequenceCost,
    ranks: int,
    budget: int,
    *,
    is_tight: bool,
) -> list[SequencePlacement]:
    """Deal bundles as `deal` does sequences, and return the place of each episode.

    Args:
        sizes: Size of each episode.
        bundles: Bundles of all episodes, dearest first.
        cost: Cost of a sequence.
        ranks: Number of ranks.
        budget: Most tokens of a microbatch.
        is_tight: Fill the room that bundles leave in a microbatch with episodes of later bundles,
            longest first, which repeat their prompt.
    """
    places: dict[int, SequencePlacement] = {}
    left = list(bundles)
    for number in itertools.count():
        if not left:
            return [places[row] for row in range(len(sizes))]
        tokens = [bundle.tokens for bundle in left]
        costs = [-bundle.negative_cost for bundle in left]
        most = _cost_limit(tokens, costs, ranks, budget)
        dealt = _fill(range(len(left)), tokens, costs, most, ranks=ranks, room=budget)
        places |= {
            row: SequencePlacement(rank, number)
            for n, rank in dealt.items()
            for row in left[n].rows
        }
        left, first = [bundle for n, bundle in enumerate(left) if n not in dealt], left
        if not is_tight:
            continue
        for rank in range(ranks):
            bundles_here = [first[n] for n, dealt_to in dealt.items() if dealt_to == rank]
            free = budget - sum(bundle.tokens for bundle in bundles_here)
            prompts = {sizes[bundle.rows[0]].prompt for bundle in bundles_here}
            waiting = [row for bundle in left for row in bundle.rows if row not in places]
            places |= {
                row: SequencePlacement(rank, number)
                for row in _rows_for_gap(sizes, waiting, free, prompts)
            }
        left = sorted(_without_placed(left, places, sizes, cost))
    raise AssertionError("unreachable")


def _without_placed(
    bundles: Iterable[Bundle],
    places: Mapping[int, SequencePlacement],
    sizes: Sequence[Size],
    cost: SequenceCost,
) -> Iterator[Bundle]:
    """Leave out of bundles the episodes that have a place; only these bundles are weighed anew."""
    for bundle in bundles:
        rows = [row for row in bundle.rows if row not in places]
        if len(rows) == len(bundle.rows):
            yield bundle
        elif rows:
            yield Bundle.from_rows(rows, sizes, cost)


def _rows_for_gap(
    sizes: Sequence[Size], rows: Iterable[int], free: int, prompts: Container[bytes]
) -> Iterator[int]:
    """Choose the episodes that fill `free` tokens, the longest that fits first."""
    needed = sorted(
        (-sizes[row].tokens - (sizes[row].prompt not in prompts) * sizes[row].prompt_tokens, row)
        for row in rows
    )
    for negative, row in needed:
        if -negative <= free:
            free += negative
            yield row


def lockstep(places: Sequence[SequencePlacement], costs: Sequence[float]) -> float:
    """Time of ranks that wait for one another in every microbatch, in units of cost."""
    sums: defaultdict[SequencePlacement, float] = defaultdict(float)
    for place, cost in zip(places, costs, strict=True):
        sums[place] += cost
    dearest: defaultdict[int, float] = defaultdict(float)
    for place, total in sums.items():
        dearest[place.microbatch] = max(dearest[place.microbatch], total)
    return sum(dearest.values())


def deal(
    tokens: Sequence[int], costs: Sequence[float], *, ranks: int, microbatch_tokens: int
) -> list[SequencePlacement]:
    """Deal sequences to the microbatches of all ranks, within the budget of each.

    The j-th microbatches are filled together: dearest first, each sequence to the rank with the
    least cost so far, while it stays below what the dearest costs, or an equal share of what is
    left if that is more. The rest waits for the microbatches after it.

    Args:
        tokens: Length of each sequence; one longer than the budget gets a microbatch of its own.
        costs: Cost of each sequence, in any unit.
        ranks: Number of ranks.
        microbatch_tokens: Most tokens of a microbatch.

    Returns:
        The place of each sequence, in their order.
    """
    places: dict[int, SequencePlacement] = {}
    left = sorted(range(len(costs)), key=lambda row: (-costs[row], row))
    number = 0
    while left:
        most = _cost_limit(
            [tokens[row] for row in left], [costs[row] for row in left], ranks, microbatch_tokens
        )
        dealt = _fill(left, tokens, costs, most, ranks=ranks, room=microbatch_tokens)
        places |= {row: SequencePlacement(rank, number) for row, rank in dealt.items()}
        left = [row for row in left if row not in dealt]
        number += 1
    return [places[row] for row in range(len(costs))]


def _cost_limit(tokens: Sequence[int], costs: Sequence[float], ranks: int, budget: int) -> float:
    """Return the most that one of the next microbatches may cost, for sequences dearest first."""
    needed = math.ceil(sum(tokens) / (FILLED * ranks * budget))
    # The last microbatches take every sequence that fits, and a single rank waits for no other.
    if needed == 1 or ranks == 1:
        return math.inf
    return max(costs[0], sum(costs) / (ranks * needed))


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
