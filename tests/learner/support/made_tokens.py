"""Scored tokens made up for tests of the loss: log-probs, advantages and weights, no model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from learner.algorithm.microbatch import Microbatch, PreparedMicrobatch, Sequences


def make_prepared(
    log_mu_N: Tensor,
    advantages_N: Tensor,
    weights_N: Tensor,
    *,
    lengths: Sequence[int] | None = None,
    lags_N: Tensor | None = None,
    log_prox_N: Tensor | None = None,
    log_ratio_bound: float = float("inf"),
) -> PreparedMicrobatch:
    """Make a prepared microbatch of these tokens; by default each is an episode of its own."""
    lengths = [1] * len(log_mu_N) if lengths is None else lengths
    assert sum(lengths) == len(log_mu_N)
    nothing_N = torch.zeros(len(log_mu_N), dtype=torch.int64)
    lags_N = nothing_N if lags_N is None else lags_N
    episodes_N = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    nothing_B = torch.zeros(len(lengths), dtype=torch.int64)
    microbatch = Microbatch(
        sequences=Sequences.from_token_ids([[0]] * len(lengths)),
        indices_N=nothing_N,
        behaviour_logprobs_N=log_mu_N,
        advantages_N=advantages_N,
        weights_N=weights_N,
        lags_N=lags_N,
        episodes_N=episodes_N,
        rewards_B=torch.zeros(len(lengths)),
        oldest_lags_B=nothing_B.scatter_reduce(0, episodes_N, lags_N, "amax"),
        places_N=torch.arange(len(log_mu_N)),
        minibatch=0,
    )
    return PreparedMicrobatch(microbatch, log_prox_N=log_prox_N, log_ratio_bound=log_ratio_bound)
