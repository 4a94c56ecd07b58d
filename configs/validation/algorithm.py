"""Rules of the mathematics; each check returns an error text, or None.

pi/mu enters a loss once, and a ratio is taken against the policy that it is meant for.
"""

from __future__ import annotations

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
        _drops_the_ratio,
        _ignores_nothing,
        _moves_the_anchor,
        _measures_from_another_policy,
        _corrects_what_tapers,
        _clips_products,
        _truncates_before_clipping,
        _clips_twice_in_vain,
        _keeps_nothing,
        _cuts_groups,
    )
    return [text for check in checks if (text := check(settings)) is not None]


def _drops_the_ratio(settings: AllTables) -> str | None:
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
        f"algorithm.ignore_behaviour"
    )


def _ignores_nothing(settings: AllTables) -> str | None:
    algorithm = settings.algorithm
    if not algorithm.ignore_behaviour:
        return None
    if algorithm.correction == "none" and algorithm.proximal != "behaviour":
        return None
    return (
        f"algorithm.ignore_behaviour must be false with algorithm.correction "
        f"{algorithm.correction} and algorithm.proximal {algorithm.proximal}, got true; "
        f"they use the behaviour policy: take none and recomputed"
    )


def _moves_the_anchor(settings: AllTables) -> str | None:
    algorithm = settings.algorithm
    steps = algorithm.num_epochs * algorithm.num_minibatches
    if algorithm.proximal != "interpolated" or steps == 1:
        return None
    return (
        f"algorithm.num_epochs x algorithm.num_minibatches must be 1 where algorithm.proximal is "
        f"interpolated, got {steps}; its anchor is in part the current policy, and would move with "
        f"it from step to step; to hold it takes the forward pass that it saves: take recomputed"
    )


def _measures_from_another_policy(settings: AllTables) -> str | None:
    algorithm = settings.algorithm
    if algorithm.surrogate not in ABOUT_MU or algorithm.proximal == "behaviour":
        return None
    return (
        f"algorithm.proximal must be behaviour with algorithm.surrogate {algorithm.surrogate}, "
        f"got {algorithm.proximal}; its trust region is about the policy that sampled, and its "
        f"ratio would be taken against the wrong one"
    )


def _corrects_what_tapers(settings: AllTables) -> str | None:
    algorithm = settings.algorithm
    if algorithm.surrogate != "topr" or algorithm.correction == "none":
        return None
    return (
        f"algorithm.correction must be none with algorithm.surrogate topr, got "
        f"{algorithm.correction}; it truncates the ratio of an episode itself"
    )


def _clips_products(settings: AllTables) -> str | None:
    algorithm = settings.algorithm
    if algorithm.correction not in SEQUENCE_WEIGHTS or algorithm.proximal != "behaviour":
        return None
    if algorithm.surrogate == "reinforce":
        return None
    return (
        f"algorithm.surrogate must be reinforce with algorithm.correction {algorithm.correction} "
        f"and algorithm.proximal behaviour, got {algorithm.surrogate}; its trust region would be "
        f"about the product of an episode's ratios: take proximal recomputed"
    )


def _truncates_before_clipping(settings: AllTables) -> str | None:
    algorithm, bound = settings.algorithm, 1 + settings.algorithm.clip_high
    if algorithm.proximal != "behaviour" or algorithm.surrogate not in ("clip", "cispo"):
        return None
    if algorithm.correction not in ("tis", "geo_mask", "token_veto") or algorithm.rho_bar > bound:
        return None
    return (
        f"algorithm.rho_bar must be > 1 + algorithm.clip_high = {bound}, got {algorithm.rho_bar}; "
        f"the upper clip would never act: raise it, or set algorithm.correction to none"
    )


def _clips_twice_in_vain(settings: AllTables) -> str | None:
    algorithm = settings.algorithm
    if algorithm.dual_clip is None:
        return None
    if algorithm.surrogate != "clip":
        return (
            f"algorithm.dual_clip must be null with algorithm.surrogate {algorithm.surrogate}, got "
            f"{algorithm.dual_clip}; it belongs to clip"
        )
    if algorithm.dual_clip <= 1 + algorithm.clip_high:
        return (
            f"algorithm.dual_clip must be > 1 + algorithm.clip_high = {1 + algorithm.clip_high}, "
            f"got {algorithm.dual_clip}; bad tokens would be held tighter than good ones"
        )
    return None


def _keeps_nothing(settings: AllTables) -> str | None:
    for low, high in (("mask_low", "mask_high"), ("geo_low", "geo_high")):
        lowest, highest = getattr(settings.algorithm, low), getattr(settings.algorithm, high)
        if not lowest <= 1 <= highest:
            return (
                f"algorithm.{low} and algorithm.{high} must have 1 between them, got {lowest} and "
                f"{highest}; tokens on which both policies agree would be left out"
            )
    return None


def _cuts_groups(settings: AllTables) -> str | None:
    parts, groups = settings.algorithm.num_minibatches, settings.run.groups_per_batch
    if parts <= groups:
        return None
    return (
        f"algorithm.num_minibatches must be <= run.groups_per_batch = {groups}, got {parts}; "
        f"an optimizer step would have nothing to train on"
    )
