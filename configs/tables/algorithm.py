"""`algorithm`, `critic` and `rewards`: how rewards become gradients."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from .base import NonNegative, Positive, SettingsTable

CLIP_BOUNDS = {
    "clip": (0.2, 0.28),
    "gspo": (3e-4, 4e-4),
    "gmpo": (0.4, 0.4),
    "cispo": (1.0, 4.0),
    "dppo_tv": (0.2, 0.2),
    "dppo_kl": (0.05, 0.05),
}
"""Surrogate -> `clip_low` and `clip_high` that its paper or its users take."""


OF_FUNCTIONS = ("advantage", "correction", "surrogate")
"""Keys of `algorithm` that may name a function of the user."""

UserFunction = Annotated[str, Field(pattern=r"^(.+\.py|[\w.]+):\w+$|^[\w.-]+/\w+$")]
"""A function of the user, or one that an installed package registers: docs/losses.md."""


def is_user_function(name: str) -> bool:
    """Whether a setting names a function of the user or of a package, and none of ours."""
    return ":" in name or "/" in name


class AlgorithmSettings(SettingsTable):
    """How rewards become gradients: advantage x correction x surrogate x aggregation."""

    advantage: (
        Literal[
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
            "none",
        ]
        | UserFunction
    ) = "grpo"
    """How rewards become advantages.

    Change it to compare estimators; `gae` and `vtrace` need a critic, `none` a teacher."""
    whiten: Literal["none", "group", "batch"] | None = None
    """Bring advantages to mean 0 and standard deviation 1: over the episodes of a group, or over
    the trained tokens of the batch; null = as the paper of `advantage` does.

    Change it to test whether scaling by the standard deviation helps, which favours questions of
    little spread."""
    pass_k: Positive = 4
    """`pass_at_k`: answers of which only the best counts; less than `run.group_size`.

    Set it to the k of the pass@k that you want to raise."""
    filter_zero_variance: bool = False
    """Dynamic sampling (DAPO): a group whose rewards are all equal is replaced by another before
    its batch is sealed.

    Change it when many groups are entirely correct or entirely wrong, and sampling is cheap."""
    filter_metric: str | None = None
    """Value that `filter_zero_variance` compares: a part of the reward or a metric of the
    environment, by name, such as `exact`; `accuracy` = `exact` if the environment's own score is
    trained and has it, otherwise as null; null = the reward that is trained, without the soft
    overlong punishment.

    Change it when shaping of the reward hides that answers are equally correct."""
    max_gen_batches: Positive = 10
    """Most batches' worth of groups that are sampled to fill one batch; after that, groups of equal
    rewards are trained too, with a warning.

    Lower it when filtering makes batches take too long."""
    correction: (
        Literal[
            "none",
            "tis",
            "seq_tis",
            "geo_tis",
            "mis",
            "icepop",
            "seq_mis",
            "geo_mask",
            "token_veto",
        ]
        | UserFunction
    ) = "tis"
    """How pi/mu corrects for the gap between the actor's and the learner's policy.

    Change it when actors lag or sample in a lower precision: see docs/algorithms.md."""
    surrogate: (
        Literal["clip", "reinforce", "gspo", "gmpo", "cispo", "topr", "m2po", "dppo_tv", "dppo_kl"]
        | UserFunction
    ) = "clip"
    """Surrogate objective, with its trust region.

    Change it to compare trust regions: see docs/algorithms.md."""
    parameters: dict[str, float] = Field(default_factory=dict)
    """Numbers that functions of yours read, by name: `settings.parameters["tau"]`.

    Set it to choose or sweep the constants of a surrogate, correction or advantage of yours."""
    aggregation: Literal["token", "sequence", "sequence_sum", "dr_grpo"] = "token"
    """How token losses are averaged, always over all episodes of an optimizer step.

    Change it when answers differ much in length: it decides the weight of long answers."""
    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Lower bound of the trust region: of the ratio, 1 - clip_low; of its logarithm (gmpo); or of
    the divergence (dppo). Where it is not given, it is the surrogate's own (`CLIP_BOUNDS`).

    Lower it when the policy moves too far in a batch, raise it when most tokens are clipped."""
    clip_high: Annotated[float, Field(gt=0)] = 0.28
    """Upper bound of the trust region; of the ratio, 1 + clip_high (DAPO clip-higher).

    Raise it when entropy falls too early."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Largest ratio whose negative advantage still has a gradient under `clip`; null = any.

    Set it when single tokens with large ratios and negative advantages dominate the gradient; 3
    is usual."""
    second_moment: Annotated[float, Field(gt=0)] = 0.04
    """Largest mean of log(pi/mu)^2 that `m2po` leaves in an optimizer step, nats squared.

    Lower it for a tighter trust region of `m2po`."""
    rho_bar: Annotated[float, Field(gt=0)] = 2.0
    """Truncation of the importance ratio.

    Lower it when few tokens dominate a batch (`effective_sample_size` is low), raise it when much
    is truncated."""
    mask_low: NonNegative = 0.5
    """Smallest ratio that `mis`, `icepop` and `seq_mis` keep.

    Change it when `mis`, `icepop` or `seq_mis` mask too many tokens, or too few."""
    mask_high: Annotated[float, Field(gt=0)] = 5.0
    """Largest ratio that `mis`, `icepop` and `seq_mis` keep.

    Change it together with `mask_low`."""
    geo_low: NonNegative = 0.999
    """Smallest geometric mean ratio of an episode that `geo_mask` keeps.

    Change it when `geo_mask` leaves out too many episodes, or too few."""
    geo_high: Annotated[float, Field(gt=0)] = 1.001
    """Largest geometric mean ratio of an episode that `geo_mask` keeps.

    Change it together with `geo_low`."""
    veto: Annotated[float, Field(gt=0, lt=1)] = 1e-4
    """Ratio of one token below which `token_veto` leaves out its episode.

    Change it when `token_veto` leaves out too many episodes, or too few."""
    ignore_behaviour: bool = False
    """Train without pi/mu, as if the actors had the policy of the batch's beginning: the naive
    baseline, with correction `none` and a proximal policy other than the actors'.

    Change it only to measure what the correction is worth."""
    num_epochs: Positive = 1
    """How often the episodes of a batch are trained on; the batch stays one policy version.

    Raise it when sampling costs far more than training."""
    num_minibatches: Positive = 1
    """Optimizer steps of one epoch: each sees its share of the batch's groups. At most
    `run.groups_per_batch`.

    Raise it when a batch is large enough for several optimizer steps."""
    proximal: Literal["behaviour", "recomputed", "interpolated"] = "behaviour"
    """Policy against which the surrogate's ratio is taken: the actors' (ratio pi/mu), the one at
    the beginning of the batch (decoupled: ratio pi/prox, the correction weighs prox/mu), or an
    interpolation of mu and pi by each token's policy lag, which saves that forward pass (A-3PO).

    Set it to `recomputed` with several epochs, minibatches or more lag; to `interpolated` when that
    forward pass is too expensive."""
    entropy_bonus: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the entropy in the objective.

    Raise it when entropy falls to almost 0 before the reward is high."""
    entropy_target: NonNegative | None = None
    """Entropy, nats per token, that `entropy_bonus` is adapted to keep: raised by `entropy_step`
    after each batch below, lowered after each above; null = a constant bonus.

    Set it instead of searching for a constant bonus."""
    entropy_step: Annotated[float, Field(gt=0)] = 0.005
    """Change of `entropy_bonus` at each batch where there is an `entropy_target`.

    Lower it when the entropy swings around its target."""
    kl_coefficient: NonNegative = 0.0
    """Weight of KL(pi || ref), the distance to a frozen reference policy; 0 = no reference.

    Raise it when the model forgets abilities that it had, or exploits the reward; the reference
    takes memory, except with adapters, whose frozen model serves as the reference."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """How the KL of a sampled token is estimated (Schulman 2020).

    Change it when the loss of the KL is too noisy, or is paid in the reward."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Term that the KL is added to: the loss, or each token's reward (k1, and advantages that
    differ from token to token).

    Set it to `reward` for the form of PPO-RLHF."""
    kl_target: Annotated[float, Field(gt=0)] | None = None
    """KL(pi || ref), nats per token, that `kl_coefficient` is adapted to keep (Ziegler et al.
    2019); null = a constant coefficient.

    Set it instead of searching for a constant coefficient."""
    reference_model: str | None = None
    """Model directory or hub name of the reference; null = the model that the run began with.

    Change it when the policy should stay near another model than its initial one."""
    teacher: str | dict[str, str] | None = None
    """Model directory or hub name of a teacher with the tokenizer of `run.model`, or one for each
    environment by the environment's name: tokens that it finds likelier than the policy does are
    reinforced (on-policy distillation); null = no teacher.

    Set it to a better model, from which the policy then learns token by token."""
    teacher_weight: NonNegative = 1.0
    """Weight of the teacher's advantage, log(teacher/pi), beside that of the reward.

    Lower it when the reward should count for more than the teacher."""
    teacher_in: Literal["learner", "actor"] = "learner"
    """Process that computes the teacher's log-probs: the learner, or processes of their own that
    score finished episodes (`actors.teachers`).

    Set it to `actor` when the learner has no room for the teacher."""
    teacher_prompt: str | None = None
    """Privileged context, a system message before the prompt that only the teacher reads: a text,
    or `path/to/file.py:function` that returns one. Where `teacher` is null, the teacher is the
    model that the run began with (self-distillation).

    Set it to knowledge that the policy should have without being told."""

    @property
    def has_teacher(self) -> bool:
        """Whether a teacher scores tokens."""
        return self.teacher is not None or self.teacher_prompt is not None

    @property
    def teachers(self) -> tuple[str | None, ...]:
        """Each teacher once; None = the model that the run began with."""
        if isinstance(self.teacher, dict):
            return tuple(dict.fromkeys(self.teacher.values()))
        return (self.teacher,) if self.has_teacher else ()

    def teacher_of(self, environment: str) -> int | None:
        """Return the number of an environment's teacher among `teachers`; None = it has none."""
        if isinstance(self.teacher, dict):
            model = self.teacher.get(environment)
            return None if model is None else self.teachers.index(model)
        return 0 if self.has_teacher else None

    @property
    def teacher_processes(self) -> dict[str, str]:
        """Names of the teachers that are processes of their own -> their models."""
        if self.teacher is None or self.teacher_in == "learner":
            return {}
        return {"teacher": self.teacher} if isinstance(self.teacher, str) else self.teacher

    def scoring_teacher(self, environment: str) -> str:
        """Name of the process that scores the episodes of an environment; empty = none."""
        name = "teacher" if isinstance(self.teacher, str) else environment
        return name if name in self.teacher_processes else ""

    @model_validator(mode="before")
    @classmethod
    def _take_the_bounds_of_the_surrogate(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("surrogate") not in CLIP_BOUNDS:
            return values
        low, high = CLIP_BOUNDS[values["surrogate"]]
        return {"clip_low": low, "clip_high": high, **values}


# --------------------------------------------------------------------------------------------------
# `critic`: the estimate of values, and the advantages made from it.


class CriticSettings(SettingsTable):
    """The value function that `algorithm.advantage: gae` and `vtrace` measure rewards against."""

    kind: Literal["none", "head", "model"] = "none"
    """A linear layer on the policy's last hidden states, or a second model that starts from the
    policy's weights and has such a layer of its own. Neither is ever published to actors.

    Set it to `head` or `model` with `algorithm.advantage: gae` or `vtrace`."""
    trunk_gradient: bool = False
    """`head`: let the value loss train the policy's own layers too, scaled by `coefficient`.

    Set it to true when a head on fixed layers cannot tell good states from bad."""
    lr: Annotated[float, Field(gt=0)] = 1e-5
    """Learning rate, constant. 1e-5 suits a second model, and about 1e-3 a head alone.

    Set it to about 1e-3 for a head alone."""
    microbatch_tokens: Annotated[int, Field(gt=0)] | None = None
    """`model`: most tokens of one of its passes, as `learner.microbatch_tokens` is for the policy;
    null = the policy's microbatches.

    Raise it when the critic leaves memory free, as it computes no logits; lower it when its passes
    need most of the memory."""
    offload: tuple[Literal["parameters", "activations"], ...] | None = None
    """`model`: its tensors in host memory, as `learner.offload`; null = as the policy's.

    Set it to `[parameters]` when policy and critic do not fit on the card together."""
    warmup_batches: Annotated[int, Field(ge=0)] = 0
    """First batches of the run that train the critic only; the policy stays as it is.

    Raise it when the first advantages of an untrained critic damage the policy."""
    coefficient: Annotated[float, Field(gt=0)] = 0.5
    """Weight of the value loss beside the policy's: it matters where both share layers, and for
    `learner.max_grad_norm`.

    Lower it when the value loss disturbs layers that both share."""
    clip: Annotated[float, Field(gt=0)] | None = None
    """Most that a batch moves a value, in units of reward, beyond which there is no gradient (PPO's
    clipped value loss); null = no bound.

    Change it when values jump between batches."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount of one trained token.

    Set it below 1 when earlier rewards should count for more than late ones."""
    lam: Annotated[float, Field(ge=0, le=1)] = 1.0
    """`gae`: lambda; 1 = whole returns, 0 = only the next token's value.

    Set it below 1 when returns are noisy and the critic is good."""
    rho_bar: Annotated[float, Field(gt=0)] = 1.0
    """`vtrace`: truncation of pi/mu in targets and advantages.

    Raise it when off-policy targets are biased, lower it when they are noisy."""
    c_bar: Annotated[float, Field(gt=0)] = 1.0
    """`vtrace`: truncation of pi/mu in the trace; at most `rho_bar`.

    Lower it when traces over many tokens are noisy."""


# --------------------------------------------------------------------------------------------------
# `rewards`: changes that the learner makes to the rewards of episodes.


class RewardSettings(SettingsTable):
    """The shaping of an episode's reward before advantages are computed."""

    weights: dict[str, float] = Field(default_factory=dict)
    """Weight of each part of the reward, by name; parts that are not listed do not count. Empty =
    the reward as the actor gave it.

    Change it when parts of the reward should count differently."""
    overlong_buffer_tokens: Annotated[int, Field(ge=0)] = 0
    """Soft overlong punishment (DAPO): the penalty grows from 0 to `overlong_penalty` over this
    many tokens before `run.max_completion_tokens`; 0 = none.

    Raise it when answers grow to the token limit."""
    overlong_penalty: NonNegative = 1.0
    """Penalty on the reward of an episode of the maximal length.

    Change it when the penalty is too weak or too strong for your rewards."""
    overlong_filter: bool = False
    """Train no token of an episode that the token limit ended; its reward still counts in its
    group.

    Change it when truncated answers are judged unfairly."""
