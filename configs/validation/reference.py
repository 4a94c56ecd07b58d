"""Rules of the KL to a reference policy; each check returns an error text, or None."""

from __future__ import annotations

from configs.tables.all_tables import AllTables

REWARDED_BY_TOKEN = ("reinforce_pp", "gae", "vtrace")
"""Advantages in which each token may have a reward of its own."""


def reference_disagreements(settings: AllTables) -> list[str]:
    """List what is wrong about the KL to a reference, each with what to change."""
    checks = (_adapts_nothing, _pays_by_group, _pays_what_has_no_gradient, _whitens_groups)
    return [text for check in checks if (text := check(settings)) is not None]


def pays_in_reward(settings: AllTables) -> bool:
    """Whether tokens pay the KL with their reward."""
    return settings.algorithm.kl_coefficient > 0 and settings.algorithm.kl_in == "reward"


def _adapts_nothing(settings: AllTables) -> str | None:
    algorithm = settings.algorithm
    if algorithm.kl_target is None or algorithm.kl_coefficient > 0:
        return None
    return (
        "algorithm.kl_coefficient must be > 0 with algorithm.kl_target, got 0; it is multiplied "
        "after each batch and would stay 0: set where it begins, such as 0.01"
    )


def _pays_by_group(settings: AllTables) -> str | None:
    advantage = settings.algorithm.advantage
    if not pays_in_reward(settings) or advantage in REWARDED_BY_TOKEN:
        return None
    return (
        f"algorithm.advantage must be reinforce_pp, gae or vtrace with algorithm.kl_in = reward, "
        f"got {advantage}; it gives all tokens of an episode one number, in which the KL of each "
        f"would be lost: set algorithm.kl_in to loss"
    )


def _pays_what_has_no_gradient(settings: AllTables) -> str | None:
    estimator = settings.algorithm.kl_estimator
    if not pays_in_reward(settings) or estimator == "k1":
        return None
    return (
        f"algorithm.kl_estimator must be k1 with algorithm.kl_in = reward, got {estimator}; the "
        f"policy gradient of its mean is not that of the KL: set it to k1, or kl_in to loss"
    )


def _whitens_groups(settings: AllTables) -> str | None:
    if not pays_in_reward(settings) or settings.algorithm.whiten != "group":
        return None
    return (
        "algorithm.whiten must be none or batch with algorithm.kl_in = reward, got group; tokens "
        "that differ within an episode are whitened over the batch"
    )
