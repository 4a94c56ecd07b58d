"""Time of ranks that wait for one another in every microbatch, and the least; in units of cost."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from learner.data.dealing import SequencePlacement, Size, lockstep
from learner.model.sequence_cost import SequenceCost

GROUP_SIZE = 8
MEAN_TOKENS, MOST_TOKENS = 4000, 32768


def made_sizes(number: int, *, prompts: tuple[int, int], seed: int = 0) -> list[Size]:
    """Make groups of eight answers, of mean 4,000 and at most 32,768 tokens."""
    random = np.random.default_rng(seed)
    answers = random.lognormal(math.log(MEAN_TOKENS) - 0.5, 1.0, number).clip(1, MOST_TOKENS)
    lengths = random.integers(*prompts, number // GROUP_SIZE)
    return [
        Size(
            prompt=(row // GROUP_SIZE).to_bytes(4, "big"),
            prompt_tokens=int(lengths[row // GROUP_SIZE]),
            tokens=int(answer),
            scored=int(answer),
        )
        for row, answer in enumerate(answers)
    ]


def time_of(
    places: Sequence[SequencePlacement], sizes: Sequence[Size], cost: SequenceCost
) -> float:
    """Add up over microbatches what the dearest rank's costs, each of its prompts once."""
    prompts = {
        (place, size.prompt): cost(size.prompt_tokens, 0)
        for place, size in zip(places, sizes, strict=True)
    }
    own = [cost(size.tokens, size.scored, after=size.prompt_tokens) for size in sizes]
    return lockstep([*places, *(place for place, _ in prompts)], [*own, *prompts.values()])


def least_lockstep(
    sizes: Sequence[Size], cost: SequenceCost, *, ranks: int, microbatch_tokens: int
) -> float:
    """Bound `time_of` from below, whatever the plan, as if each prompt were computed once.

    An episode longer than the budget has a microbatch of its own. Beside it the other ranks compute
    at most a full microbatch of shorter ones, so those episodes are best run side by side, and the
    rest of the batch in microbatches that all ranks share evenly.
    """
    costs = [cost(size.tokens, size.scored, after=size.prompt_tokens) for size in sizes]
    prompts = {size.prompt: cost(size.prompt_tokens, 0) for size in sizes}
    total = sum(costs) + sum(prompts.values())
    long = sorted(
        (
            each
            for size, each in zip(sizes, costs, strict=True)
            if size.prompt_tokens + size.tokens > microbatch_tokens
        ),
        reverse=True,
    )
    short = total - sum(long)
    full = cost(microbatch_tokens, microbatch_tokens)
    dearest = long[::ranks]
    idle = -len(long) % ranks  # ranks beside the last of the long ones
    beside = idle * min(dearest[-1], full) if dearest else 0.0
    return max(*costs, total / ranks, sum(dearest) + max(0.0, short - beside) / ranks)
