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
    the weights go back to the newest checkpoint."""
    max_rollbacks: Annotated[int, Field(ge=0)] = 3
    """Times in a run that the weights go back; at the next one the learner ends with an error."""
    rollback_lr_factor: Share = 0.5
    """What the learning rate is multiplied with at each rollback, for the rest of the run."""
    rollback_clip_factor: Share = 0.5
    """What `algorithm.clip_low` and `clip_high` are multiplied with at each rollback."""
    max_kl: Annotated[float, Field(gt=0)] | None = None
    """KL(pi || mu) of a batch, nats per token, above which the learning rate is lowered; null =
    never."""
    kl_lr_factor: Share = 0.5
    """What the learning rate is multiplied with for each batch above `max_kl`."""
    kl_lr_floor: Share = 0.1
    """As a share of the schedule, how low `max_kl` may bring the learning rate."""
    kl_lr_recovery: Annotated[float, Field(ge=1)] = 1.1
    """What it is multiplied with for each batch below `max_kl`, until it is the schedule's
    again."""
    min_ess: Annotated[float, Field(ge=0, le=1)] = 0.3
    """Effective sample size of a batch, as a share of its tokens, below which an alert is
    raised; 0 = never."""
    max_ratio_mean: Annotated[float, Field(gt=1)] | None = 2.0
    """Mean ratio pi/mu of a batch above which, or below 1 / which, an alert is raised."""
    max_ratio: Annotated[float, Field(gt=1)] | None = None
    """Largest ratio pi/mu of a batch above which an alert is raised; null = never."""
