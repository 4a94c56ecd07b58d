"""`algorithm`: the mathematics of training."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from .base import NonNegative, Positive, Table

CLIP_BOUNDS = {
    "clip": (0.2, 0.28),
    "gspo": (3e-4, 4e-4),
    "gmpo": (0.4, 0.4),
    "cispo": (1.0, 4.0),
    "dppo_tv": (0.2, 0.2),
    "dppo_kl": (0.05, 0.05),
}
"""Surrogate -> `clip_low` and `clip_high` that its paper or its users take."""


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
        "gae",
        "vtrace",
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
    filter_metric: str | None = None
    """What `filter_zero_variance` compares: a part of the reward or a metric of the environment, by
    name, such as `exact`; null = the reward that is trained, with all that shapes it."""
    max_gen_batches: Positive = 10
    """Batches' worth of groups that are made to fill one batch; after that, groups of equal rewards
    are trained too, with a warning."""
    correction: Literal[
        "none", "tis", "seq_tis", "geo_tis", "mis", "icepop", "seq_mis", "geo_mask", "token_veto"
    ] = "tis"
    """How pi/mu corrects for the gap between the actor's and the learner's policy."""
    surrogate: Literal[
        "clip", "reinforce", "gspo", "gmpo", "cispo", "topr", "m2po", "dppo_tv", "dppo_kl"
    ] = "clip"
    """Surrogate objective, with its trust region."""
    aggregation: Literal["token", "sequence", "sequence_sum", "dr_grpo"] = "token"
    """How token losses are averaged, always over all that an optimizer step sees."""
    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Lower bound of the trust region: of the ratio, 1 - clip_low; of its logarithm (gmpo); or of
    the divergence (dppo). Where it is not given, it is the surrogate's own (`CLIP_BOUNDS`)."""
    clip_high: Annotated[float, Field(gt=0)] = 0.28
    """Upper bound of the trust region; of the ratio, 1 + clip_high (DAPO clip-higher)."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Largest ratio whose negative advantage still has a gradient under `clip`; null = any."""
    second_moment: Annotated[float, Field(gt=0)] = 0.04
    """Largest mean of log(pi/mu)^2 that `m2po` leaves in an optimizer step, nats squared."""
    rho_bar: Annotated[float, Field(gt=0)] = 2.0
    """Truncation of the importance ratio."""
    mask_low: NonNegative = 0.5
    """Smallest ratio that `mis`, `icepop` and `seq_mis` keep."""
    mask_high: Annotated[float, Field(gt=0)] = 5.0
    """Largest ratio that they keep."""
    geo_low: NonNegative = 0.999
    """Smallest geometric mean ratio of an episode that `geo_mask` keeps."""
    geo_high: Annotated[float, Field(gt=0)] = 1.001
    """Largest one."""
    veto: Annotated[float, Field(gt=0, lt=1)] = 1e-4
    """Ratio of one token below which `token_veto` leaves out its episode."""
    ignore_behaviour: bool = False
    """Train without pi/mu, as if the actors had the policy of the batch's beginning: the naive
    baseline, with correction none and a proximal policy other than the actors'."""
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

    @model_validator(mode="before")
    @classmethod
    def _take_the_bounds_of_the_surrogate(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.get("surrogate") not in CLIP_BOUNDS:
            return given
        low, high = CLIP_BOUNDS[given["surrogate"]]
        return {"clip_low": low, "clip_high": high, **given}
