"""`algorithm`: the mathematics of training."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .base import Table


class AlgorithmSettings(Table):
    """How rewards become gradients: advantage x correction x surrogate x aggregation."""

    advantage: Literal["grpo", "dr_grpo", "rloo"] = "grpo"
    """How rewards of a group become advantages."""
    correction: Literal["none", "tis"] = "tis"
    """How pi/mu corrects for the gap between the actor's and the learner's policy."""
    surrogate: Literal["clip", "reinforce"] = "clip"
    """Surrogate objective: PPO clip with separate bounds, or plain policy gradient."""
    aggregation: Literal["token", "sequence", "dr_grpo"] = "token"
    """How token losses are averaged, always over the whole batch."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Lower clip bound: 1 - clip_low."""
    clip_high: Annotated[float, Field(gt=0)] = 0.28
    """Upper clip bound: 1 + clip_high (DAPO clip-higher)."""
    rho_bar: Annotated[float, Field(gt=0)] = 2.0
    """Truncation of the importance ratio."""
    entropy_bonus: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the entropy in the objective."""
