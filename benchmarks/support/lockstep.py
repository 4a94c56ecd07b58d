"""The least time of ranks that wait for one another in every microbatch, in units of cost."""

from __future__ import annotations

from collections.abc import Sequence

from learner.model.sequence_cost import SequenceCost


def least_lockstep(
    tokens: Sequence[int],
    costs: Sequence[float],
    *,
    ranks: int,
    microbatch_tokens: int,
    cost: SequenceCost,
) -> float:
    """Bound `lockstep` from below, whatever the plan.

    A sequence longer than the budget has a microbatch of its own. Beside it the other ranks compute
    at most a full microbatch of shorter ones, so those sequences are best run side by side, and the
    rest of the batch in microbatches that all ranks share evenly.
    """
    pairs = list(zip(tokens, costs, strict=True))
    long = sorted((c for length, c in pairs if length > microbatch_tokens), reverse=True)
    short = sum(costs) - sum(long)
    full = cost(microbatch_tokens, microbatch_tokens)
    dearest = long[::ranks]
    idle = -len(long) % ranks  # ranks beside the last of the long ones
    beside = idle * min(dearest[-1], full) if dearest else 0.0
    return max(*costs, sum(costs) / ranks, sum(dearest) + max(0.0, short - beside) / ranks)
