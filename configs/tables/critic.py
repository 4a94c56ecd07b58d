"""`critic`: the estimate of values, and the advantages made from it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .base import Table


class CriticSettings(Table):
    """The value function that `algorithm.advantage: gae` and `vtrace` measure rewards against."""

    kind: Literal["none", "head", "model"] = "none"
    """A linear layer on the policy's last hidden states, or a second model that starts from the
    policy's weights and has such a layer of its own. Neither is ever published to actors."""
    trunk_gradient: bool = False
    """`head`: let the value loss train the policy's own layers too, scaled by `coefficient`."""
    lr: Annotated[float, Field(gt=0)] = 1e-5
    """Learning rate, constant. 1e-5 suits a second model; a head alone bears 1e-3."""
    warmup_batches: Annotated[int, Field(ge=0)] = 0
    """First batches of the run that train the critic only; the policy stays as it is."""
    coefficient: Annotated[float, Field(gt=0)] = 0.5
    """What the value loss weighs beside the policy's: it matters where they share layers, and for
    `learner.max_grad_norm`."""
    clip: Annotated[float, Field(gt=0)] | None = None
    """How far a batch moves a value at most, in units of reward: no gradient beyond; null = freely
    (PPO's clipped value loss)."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount of one trained token."""
    lam: Annotated[float, Field(ge=0, le=1)] = 1.0
    """`gae`: lambda; 1 = whole returns, 0 = the next token's value alone."""
    rho_bar: Annotated[float, Field(gt=0)] = 1.0
    """`vtrace`: truncation of pi/mu in targets and advantages."""
    c_bar: Annotated[float, Field(gt=0)] = 1.0
    """`vtrace`: truncation of pi/mu in the trace; at most `rho_bar`."""
