"""Rules of algorithm, critic, reference KL and teacher.

pi/mu enters a loss once, and a ratio is taken against the policy that it is meant for.
"""

from __future__ import annotations

from configs.tables.algorithm import OF_FUNCTIONS, is_user_function
from configs.tables.all_tables import AllTables

ABOUT_MU = ("topr", "m2po", "dppo_tv", "dppo_kl")
"""Surrogates whose papers measure from the policy that sampled."""
WITH_BEHAVIOUR = ("vtrace",)
"""Advantages that prox/mu is in already."""
SEQUENCE_WEIGHTS = ("seq_tis", "geo_tis", "seq_mis")
"""Corrections that give every token the ratio of its whole episode."""


def algorithm_disagreements(settings: AllTables) -> list[str]:
    """List choices that do not make a method together, each with what to change."""
    checks = (
        _check_correction_is_set,
        _check_ignore_behaviour,
        _check_interpolated_anchor,
        _check_proximal_of_surrogate,
        _check_correction_of_topr,
        _check_surrogate_of_sequence_weights,
        _check_rho_bar_above_clip,
        _check_dual_clip,
        _check_mask_bounds,
        _check_num_minibatches,
        _check_parameters,
    )
    return [text for check in checks if (text := check(settings)) is not None]


def _check_correction_is_set(settings: AllTables) -> str | None:
    algorithm = settings.algorithm
    is_dropped = algorithm.correction == "none" and algorithm.proximal != "behaviour"
    if not is_dropped or algorithm.ignore_behaviour or settings.run.max_policy_lag == 0:
        return None
    if algorithm.advantage in WITH_BEHAVIOUR:
        return None
    return (
        f"algorithm.correction must weigh prox/mu where algorithm.proximal is "
        f"{algorithm.proximal} and episodes may lag, got none; the ratio to the policy that "
        f"sampled would be dropped: take tis, or, for a naive baseline, set "
        f"algorithm.ignore_behaviour to true"
    )


def _check_ignore_behaviour(settings: AllTables) -> str | None:
    algorithm = settings.algorithm
    if not algorithm.ignore_behaviour:
        return None
    if algorithm.correction == "none" and algorithm.proximal != "behaviour":
        return None
    return (
        f"algorithm.ignore_behaviour must be false with algorithm.correction "
        f"{algorithm.correction} and algorithm.proximal {algorithm.proximal}, got true; "
        f"set it to false, or algorithm.correction to none and algorithm.proximal to recomputed"
    )


def _check_interpolated_anchor(settings: AllTables) -> str | None:
    algorithm = settings.algorithm
    steps = algorithm.num_epochs * algorithm.num_minibatches
    if algorithm.proximal != "interpolated" or steps == 1:
        return None
    return (
        f"algorithm.num_epochs x algorithm.num_minibatches must be 1 where algorithm.proximal is "
        f"interpolated, got {steps}; its anchor would move with the policy from step to step: set "
        f"both to 1, or algorithm.proximal to recomputed"
    )


def _check_proximal_of_surrogate(settings: AllTables) -> str | None:
    algorithm = settings.algorithm
    if algorithm.surrogate not in ABOUT_MU or algorithm.proximal == "behaviour":
        return None
    return (
        f"algorithm.proximal must be behaviour with algorithm.surrogate {algorithm.surrogate}, "
        f"got {algorithm.proximal}; its trust region is about the policy that sampled: set "
        f"algorithm.proximal to behaviour, or take another surrogate"
    )


def _check_correction_of_topr(settings: AllTables) -> str | None:
    algorithm = settings.algorithm
    if algorithm.surrogate != "topr" or algorithm.correction == "none":
        return None
    return (
        f"algorithm.correction must be none with algorithm.surrogate topr, got "
        f"{algorithm.correction}; topr truncates the ratios itself: set the correction to none"
    )


def _check_surrogate_of_sequence_weights(settings: AllTables) -> str | None:
    algorithm = settings.algorithm
    if algorithm.correction not in SEQUENCE_WEIGHTS or algorithm.proximal != "behaviour":
        return None
    if algorithm.surrogate == "reinforce":
        return None
    return (
        f"algorithm.surrogate must be reinforce with algorithm.correction {algorithm.correction} "
        f"and algorithm.proximal behaviour, got {algorithm.surrogate}; its trust region would be "
        f"about the product of an episode's ratios: take reinforce, or proximal recomputed"
    )


def _check_rho_bar_above_clip(settings: AllTables) -> str | None:
    algorithm, bound = settings.algorithm, 1 + settings.algorithm.clip_high
    if algorithm.proximal != "behaviour" or algorithm.surrogate not in ("clip", "cispo"):
        return None
    if algorithm.correction not in ("tis", "geo_mask", "token_veto") or algorithm.rho_bar > bound:
        return None
    return (
        f"algorithm.rho_bar must be > 1 + algorithm.clip_high = {bound}, got {algorithm.rho_bar}; "
        f"the upper clip would never act: raise it, or set algorithm.correction to none"
    )


def _check_dual_clip(settings: AllTables) -> str | None:
    algorithm = settings.algorithm
    if algorithm.dual_clip is None:
        return None
    if algorithm.surrogate != "clip" and not is_user_function(algorithm.surrogate):
        return (
            f"algorithm.dual_clip must be null with algorithm.surrogate {algorithm.surrogate}, got "
            f"{algorithm.dual_clip}; only clip uses it: set it to null"
        )
    if algorithm.dual_clip <= 1 + algorithm.clip_high:
        return (
            f"algorithm.dual_clip must be > 1 + algorithm.clip_high = {1 + algorithm.clip_high}, "
            f"got {algorithm.dual_clip}; it would bind before the upper clip: raise it"
        )
    return None


def _check_mask_bounds(settings: AllTables) -> str | None:
    for low, high in (("mask_low", "mask_high"), ("geo_low", "geo_high")):
        lowest, highest = getattr(settings.algorithm, low), getattr(settings.algorithm, high)
        if not lowest <= 1 <= highest:
            return (
                f"algorithm.{low} and algorithm.{high} must have 1 between them, got {lowest} and "
                f"{highest}; tokens on which both policies agree would be left out: lower the "
                f"first to 1 or less, or raise the second"
            )
    return None


def _check_num_minibatches(settings: AllTables) -> str | None:
    parts, groups = settings.algorithm.num_minibatches, settings.run.groups_per_batch
    if parts <= groups:
        return None
    return (
        f"algorithm.num_minibatches must be <= run.groups_per_batch = {groups}, got {parts}; "
        f"an optimizer step would have nothing to train on: lower it"
    )


def _check_parameters(settings: AllTables) -> str | None:
    algorithm = settings.algorithm
    if not algorithm.parameters:
        return None
    if any(is_user_function(getattr(algorithm, key)) for key in OF_FUNCTIONS):
        return None
    return (
        f"algorithm.parameters must be empty without a function of yours, got "
        f"{', '.join(algorithm.parameters)}; nothing would read them: leave them out, or name a "
        f"function in algorithm.surrogate, correction or advantage"
    )


# --------------------------------------------------------------------------------------------------
# Rules between critic and algorithm; each check returns an error text, or None.

TOKEN_LEVEL = ("gae", "vtrace")
"""Advantages that are made of a critic's values."""


def critic_disagreements(settings: AllTables) -> list[str]:
    """List what is wrong about the critic, each with what to change."""
    checks = (
        _check_critic_kind,
        _check_ratios_of_vtrace,
        _check_whitening_with_critic,
        _check_whitening_of_vtrace,
        _check_trace_bounds,
        _check_trunk_gradient,
        _check_passes_of_critic,
        _check_offload_of_critic,
        _check_critic_warmup,
    )
    return [text for check in checks if (text := check(settings)) is not None]


def _check_critic_kind(settings: AllTables) -> str | None:
    advantage, kind = settings.algorithm.advantage, settings.critic.kind
    if (advantage in TOKEN_LEVEL) == (kind != "none"):
        return None
    if kind == "none":
        return (
            f"critic.kind must be head or model with algorithm.advantage = {advantage}, got none; "
            f"its advantages are measured against a critic's values: set critic.kind to head"
        )
    return (
        f"critic.kind must be none with algorithm.advantage = {advantage}, got {kind}; "
        f"nothing would use its values: set algorithm.advantage to gae or vtrace"
    )


def _check_ratios_of_vtrace(settings: AllTables) -> str | None:
    algorithm = settings.algorithm
    if algorithm.advantage != "vtrace":
        return None
    if algorithm.proximal != "recomputed":
        return (
            f"algorithm.proximal must be recomputed with algorithm.advantage = vtrace, got "
            f"{algorithm.proximal}; V-trace has prox/mu in its advantages, and it would count "
            f"twice: set algorithm.proximal to recomputed"
        )
    if algorithm.correction != "none":
        return (
            f"algorithm.correction must be none with algorithm.advantage = vtrace, got "
            f"{algorithm.correction}; V-trace has prox/mu in its advantages, truncated at "
            f"critic.rho_bar, and would be weighed with it twice: set it to none"
        )
    return None


def _check_whitening_with_critic(settings: AllTables) -> str | None:
    algorithm = settings.algorithm
    if algorithm.advantage not in TOKEN_LEVEL or algorithm.whiten != "group":
        return None
    return (
        f"algorithm.whiten must be none or batch with algorithm.advantage = "
        f"{algorithm.advantage}, got group; the critic is the baseline, not the group: "
        f"set it to batch or none"
    )


def _check_whitening_of_vtrace(settings: AllTables) -> str | None:
    algorithm = settings.algorithm
    if algorithm.advantage != "vtrace" or algorithm.whiten != "batch":
        return None
    return (
        "algorithm.whiten must be none with algorithm.advantage = vtrace, got batch; prox/mu is in "
        "its advantages, and a token of weight 0 would get one of minus the mean: set it to none"
    )


def _check_trace_bounds(settings: AllTables) -> str | None:
    critic = settings.critic
    if critic.c_bar <= critic.rho_bar:
        return None
    return (
        f"critic.c_bar must be <= critic.rho_bar = {critic.rho_bar}, got {critic.c_bar}; "
        f"lower it, or raise critic.rho_bar"
    )


def _check_trunk_gradient(settings: AllTables) -> str | None:
    critic = settings.critic
    if critic.kind == "head" or not critic.trunk_gradient:
        return None
    return (
        f"critic.trunk_gradient must be false with critic.kind = {critic.kind}, got true; "
        f"only a head shares the policy's layers: set it to false"
    )


def _check_passes_of_critic(settings: AllTables) -> str | None:
    critic = settings.critic
    values = {"microbatch_tokens": critic.microbatch_tokens, "offload": critic.offload}
    name = next((name for name, value in values.items() if value is not None), None)
    if critic.kind == "model" or name is None:
        return None
    return (
        f"critic.{name} must be null with critic.kind = {critic.kind}, got {values[name]}; only a "
        f"model has passes of its own: set critic.{name} to null, or critic.kind to model"
    )


def _check_offload_of_critic(settings: AllTables) -> str | None:
    learner, offload = settings.learner, settings.critic.offload or ()
    if "parameters" in offload and learner.optimizer == "muon":
        return (
            "critic.offload must not have parameters with learner.optimizer = muon, got both; "
            "muon's matrix products would run on the CPU: leave parameters out, or choose adamw"
        )
    kept = learner.activation_checkpointing
    if "activations" not in offload or kept in (None, "full"):
        return None
    return (
        "learner.activation_checkpointing must be full where critic.offload has activations, got "
        f"{kept}; tensors within a layer take longer to copy than to compute again: set it to null"
    )


def _check_critic_warmup(settings: AllTables) -> str | None:
    warmup, steps = settings.critic.warmup_batches, settings.run.steps
    if settings.critic.kind == "none" or warmup < steps:
        return None
    return (
        f"critic.warmup_batches must be < run.steps = {steps}, got {warmup}; "
        f"the policy would never be trained: lower it, or raise run.steps"
    )


# --------------------------------------------------------------------------------------------------
# Rules of the KL to a reference policy; each check returns an error text, or None.

REWARDED_BY_TOKEN = ("reinforce_pp", "gae", "vtrace")
"""Advantages in which each token may have a reward of its own."""


def reference_disagreements(settings: AllTables) -> list[str]:
    """List what is wrong about the KL to a reference, each with what to change."""
    checks = (
        _check_kl_target,
        _check_advantage_of_kl_reward,
        _check_kl_estimator,
        _check_whitening_with_kl_reward,
    )
    return [text for check in checks if (text := check(settings)) is not None]


def pays_in_reward(settings: AllTables) -> bool:
    """Whether the KL is taken off the rewards of tokens, and not added to the loss."""
    return settings.algorithm.kl_coefficient > 0 and settings.algorithm.kl_in == "reward"


def _check_kl_target(settings: AllTables) -> str | None:
    algorithm = settings.algorithm
    if algorithm.kl_target is None or algorithm.kl_coefficient > 0:
        return None
    return (
        "algorithm.kl_coefficient must be > 0 with algorithm.kl_target, got 0; it is multiplied "
        "after each batch and would stay 0: set it to a first value, such as 0.01"
    )


def _check_advantage_of_kl_reward(settings: AllTables) -> str | None:
    advantage = settings.algorithm.advantage
    if not pays_in_reward(settings) or advantage in REWARDED_BY_TOKEN:
        return None
    return (
        f"algorithm.advantage must be reinforce_pp, gae or vtrace with algorithm.kl_in = reward, "
        f"got {advantage}; it gives all tokens of an episode one number, in which the KL of each "
        f"would be lost: set algorithm.kl_in to loss"
    )


def _check_kl_estimator(settings: AllTables) -> str | None:
    estimator = settings.algorithm.kl_estimator
    if not pays_in_reward(settings) or estimator == "k1":
        return None
    return (
        f"algorithm.kl_estimator must be k1 with algorithm.kl_in = reward, got {estimator}; the "
        f"policy gradient of its mean is not that of the KL: set it to k1, or kl_in to loss"
    )


def _check_whitening_with_kl_reward(settings: AllTables) -> str | None:
    if not pays_in_reward(settings) or settings.algorithm.whiten != "group":
        return None
    return (
        "algorithm.whiten must be none or batch with algorithm.kl_in = reward, got group; tokens "
        "that differ within an episode are whitened over the batch: set it to batch"
    )


# --------------------------------------------------------------------------------------------------
# Rules of a teacher; each check returns an error text, or None.


def teacher_disagreements(settings: AllTables) -> list[str]:
    """List what is wrong about the teacher, each with what to change."""
    checks = (
        _check_teacher_in,
        _check_advantage_without_teacher,
        _check_teachers_of_environments,
        _check_surrogate_of_teacher,
        _check_filter_with_teacher,
    )
    return [text for check in checks if (text := check(settings)) is not None]


def _check_teacher_in(settings: AllTables) -> str | None:
    algorithm = settings.algorithm
    if algorithm.teacher_in == "learner":
        return None
    if algorithm.teacher is None:
        return (
            "algorithm.teacher must be a model where algorithm.teacher_in is actor, got null; set "
            "it to the folder or hub name of a teacher, or teacher_in to learner"
        )
    if algorithm.teacher_prompt is not None:
        return (
            "algorithm.teacher_prompt must be null where algorithm.teacher_in is actor, got a "
            "prompt; there a teacher reads what the policy read: set teacher_in to learner"
        )
    return None


def _check_advantage_without_teacher(settings: AllTables) -> str | None:
    algorithm = settings.algorithm
    if algorithm.advantage != "none" or algorithm.has_teacher:
        return None
    return (
        "algorithm.teacher must be a model where algorithm.advantage is none, got null; nothing "
        "would be trained: set it to the folder or hub name of a teacher"
    )


def _check_teachers_of_environments(settings: AllTables) -> str | None:
    algorithm, run = settings.algorithm, settings.run
    if not isinstance(algorithm.teacher, dict):
        return None
    names = list(run.by_environment)
    unknown = [name for name in algorithm.teacher if name not in names]
    if unknown or not algorithm.teacher:
        return (
            f"algorithm.teacher must name environments of the run, {', '.join(names)}, got "
            f"{', '.join(unknown) or 'none'}; correct the name"
        )
    untaught = [
        name
        for name, alone in run.by_environment.items()
        if name not in algorithm.teacher and alone.is_trained
    ]
    if algorithm.advantage != "none" or not untaught:
        return None
    return (
        f"algorithm.teacher must name a model for each environment where algorithm.advantage is "
        f"none, got none for {', '.join(untaught)}, which would train nothing; add it, or choose "
        f"an advantage such as grpo"
    )


def _check_surrogate_of_teacher(settings: AllTables) -> str | None:
    algorithm = settings.algorithm
    if not algorithm.has_teacher or algorithm.surrogate != "topr":
        return None
    return (
        "algorithm.surrogate must not be topr with algorithm.teacher, got topr; where an advantage "
        "is positive it leaves pi/mu out, which suits whole episodes only: take reinforce or clip"
    )


def _check_filter_with_teacher(settings: AllTables) -> str | None:
    algorithm = settings.algorithm
    if not algorithm.has_teacher or not algorithm.filter_zero_variance:
        return None
    return (
        "algorithm.filter_zero_variance must be false with algorithm.teacher, got true; groups of "
        "equal rewards learn from the teacher: set it to false"
    )
