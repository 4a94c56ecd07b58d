"""`critic`: the estimate of values, and the advantages made from it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .base import Table


class CriticSettings(Table):
    """The value function that `algorithm.advantage: gae` and `vtrace` measure rewards against."""

    kind: Literal["none", "head", "model"] = "none"
    """A linear layer on the policy's last hidden states, or a second model that starts from the
    policy's weights and has such a layer of its own. Neither is ever published to actors.

    Set it to `head` or `model` with `algorithm.advantage: gae` or `vtrace`."""
    trunk_gradient: bool = False
    """`head`: let the value loss train the policy's own layers too, scaled by `coefficient`.

    Set it to true when a head on fixed layers cannot tell good states from bad."""
    lr: Annotated[float, Field(gt=0)] = 1e-5
    """Learning rate, constant. 1e-5 suits a second model; a head alone bears 1e-3.

    Set it to about 1e-3 for a head alone."""
    warmup_batches: Annotated[int, Field(ge=0)] = 0
    """First batches of the run that train the critic only; the policy stays as it is.

    Raise it when the first advantages of an untrained critic spoil the policy."""
    coefficient: Annotated[float, Field(gt=0)] = 0.5
    """What the value loss weighs beside the policy's: it matters where they share layers, and for
    `learner.max_grad_norm`.

    Lower it when the value loss disturbs layers that both share."""
    clip: Annotated[float, Field(gt=0)] | None = None
    """How far a batch moves a value at most, in units of reward: no gradient beyond; null = freely
    (PPO's clipped value loss).

    Change it when values jump between batches."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount of one trained token.

    Set it below 1 when earlier rewards should count for more than late ones."""
    lam: Annotated[float, Field(ge=0, le=1)] = 1.0
    """`gae`: lambda; 1 = whole returns, 0 = the next token's value alone.

    Set it below 1 when returns are noisy and the critic is good."""
    rho_bar: Annotated[float, Field(gt=0)] = 1.0
    """`vtrace`: truncation of pi/mu in targets and advantages.

    Change it when off-policy targets are biased (up) or noisy (down)."""
    c_bar: Annotated[float, Field(gt=0)] = 1.0
    """`vtrace`: truncation of pi/mu in the trace; at most `rho_bar`.

    Lower it when traces over many tokens are noisy."""
