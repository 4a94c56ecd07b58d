"""`guards`: reactions of the learner when training goes wrong."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from .base import Positive, Table

Share = Annotated[float, Field(gt=0, le=1)]


class GuardSettings(Table):
    """When the learner warns, slows down, goes back or gives up."""

    max_skipped_in_a_row: Positive = 3
    """Batches in a row with a skipped optimizer step (loss or gradient not finite) after which
    the weights go back to the newest checkpoint.

    Lower it when weights are damaged before the third, up when single batches fail
    harmlessly."""
    max_rollbacks: Annotated[int, Field(ge=0)] = 3
    """Times in a run that the weights go back; at the next one the learner ends with an error.

    Set it to 0 to stop at once and look."""
    rollback_lr_factor: Share = 0.5
    """What the learning rate is multiplied with at each rollback, for the rest of the run.

    Lower it when training diverges again after a rollback."""
    rollback_clip_factor: Share = 0.5
    """What `algorithm.clip_low` and `clip_high` are multiplied with at each rollback.

    Lower it when training diverges again after a rollback."""
    max_kl: Annotated[float, Field(gt=0)] | None = None
    """KL(pi || mu) of a batch, nats per token, above which the learning rate is lowered; null =
    never.

    Change it when single batches move the policy too far."""
    kl_lr_factor: Share = 0.5
    """What the learning rate is multiplied with for each batch above `max_kl`.

    Lower it when the KL stays above `max_kl` for several batches."""
    kl_lr_floor: Share = 0.1
    """As a share of the schedule, how low `max_kl` may bring the learning rate.

    Lower it when even this rate is too high for it."""
    kl_lr_recovery: Annotated[float, Field(ge=1)] = 1.1
    """What it is multiplied with for each batch below `max_kl`, until it is the schedule's
    again.

    Lower it when the KL swings around `max_kl`."""
    min_ess: Annotated[float, Field(ge=0, le=1)] = 0.3
    """Effective sample size of a batch, as a share of its tokens, below which an alert is
    raised; 0 = never.

    Change it when its alert comes too often, or too late, for your correction."""
    max_ratio_mean: Annotated[float, Field(gt=1)] | None = 2.0
    """Mean ratio pi/mu of a batch above which, or below 1 / which, an alert is raised.

    Change it when its alert comes too often, or too late."""
    max_ratio: Annotated[float, Field(gt=1)] | None = None
    """Largest ratio pi/mu of a batch above which an alert is raised; null = never.

    Change it to be told of single tokens far off the policy that sampled them."""
