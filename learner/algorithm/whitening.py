"""Bringing the advantages of a batch to mean 0 and standard deviation 1, over a named scope.

Adding a scope = a function here, a line in `WHITENINGS`, and its name in `algorithm.whiten`.

Shapes: E episodes of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from .group_statistics import Float64, Outcomes

Whitening = Callable[[Float64, Outcomes], Float64]

# Keeps a group whose rewards differ by rounding alone from being blown up to unit variance.
STD_FLOOR = 1e-4


def leave_plain(advantages_E: Float64, _outcomes: Outcomes) -> Float64:
    """Whiten nothing."""
    return advantages_E


def whiten_group(advantages_E: Float64, outcomes: Outcomes) -> Float64:
    """Bring each group to mean 0 and sample standard deviation 1, over its episodes."""
    centred_E = advantages_E - outcomes.group_mean(advantages_E)
    variance_E = outcomes.group_sum(centred_E**2) / np.maximum(1, outcomes.sizes_E - 1)
    return np.asarray(centred_E / (np.sqrt(variance_E) + STD_FLOOR))


def whiten_batch(advantages_E: Float64, outcomes: Outcomes) -> Float64:
    """Bring the batch to mean 0 and standard deviation 1, over its trained tokens.

    Over tokens, as for advantages that differ from token to token: an episode counts as often as
    the loss sees it.
    """
    shares_E = outcomes.lengths_E / max(1.0, float(outcomes.lengths_E.sum()))
    centred_E = advantages_E - shares_E @ advantages_E
    return np.asarray(centred_E / (np.sqrt(shares_E @ centred_E**2) + STD_FLOOR))


WHITENINGS: Mapping[str, Whitening] = {
    "none": leave_plain,
    "group": whiten_group,
    "batch": whiten_batch,
}
