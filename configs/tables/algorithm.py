"""`algorithm`: the mathematics of training."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .base import NonNegative, Positive, Table


class AlgorithmSettings(Table):
    """How rewards become gradients: advantage x correction x surrogate x aggregation."""

    advantage: Literal[
        "grpo",
        "dr_grpo",
        "rloo",
        "reinforce_pp",
        "reinforce_pp_baseline",
        "gpg",
        "opo",
        "pass_at_k",
    ] = "grpo"
    """How rewards become advantages."""
    whiten: Literal["none", "group", "batch"] | None = None
    """Bring advantages to mean 0 and standard deviation 1: over the episodes of a group, or over
    the trained tokens of the batch; null = as the paper of `advantage` does."""
    pass_k: Positive = 4
    """`pass_at_k`: answers of which only the best counts; less than `run.group_size`."""
    filter_zero_variance: bool = False
    """Dynamic sampling (DAPO): a group whose rewards are all equal makes way for another before
    its batch is sealed."""
    max_gen_batches: Positive = 10
    """Batches' worth of groups that are made to fill one batch; after that, groups of equal rewards
    are trained too, with a warning."""
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
    num_epochs: Positive = 1
    """How often the episodes of a batch are trained on; the batch stays one policy version."""
    num_minibatches: Positive = 1
    """Optimizer steps of one epoch: each sees its share of the batch's groups. At most
    `run.groups_per_batch`."""
    proximal: Literal["behaviour", "recomputed", "interpolated"] = "behaviour"
    """Which policy the surrogate's ratio is taken against: the actors' (ratio pi/mu), the one at
    the beginning of the batch (decoupled: ratio pi/prox, the correction weighs prox/mu), or an
    interpolation of mu and pi by each token's policy lag, which saves that forward pass (A-3PO)."""
    entropy_bonus: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the entropy in the objective."""
    entropy_target: NonNegative | None = None
    """Entropy, nats per token, that `entropy_bonus` is adapted to keep: raised by `entropy_step`
    after each batch below, lowered after each above; null = a constant bonus."""
    entropy_step: Annotated[float, Field(gt=0)] = 0.005
    """What `entropy_bonus` changes by at each batch where there is an `entropy_target`."""
    kl_coefficient: NonNegative = 0.0
    """Weight of KL(pi || ref), the distance to a frozen reference policy; 0 = no reference."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """How the KL of a sampled token is estimated (Schulman 2020)."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL is paid: in the loss, or in each token's reward (k1, and advantages that differ
    from token to token)."""
    kl_target: Annotated[float, Field(gt=0)] | None = None
    """KL(pi || ref), nats per token, that `kl_coefficient` is adapted to keep (Ziegler et al.
    2019); null = a constant coefficient."""
    reference_model: str | None = None
    """Model directory or hub name of the reference; null = the model that the run began with."""
