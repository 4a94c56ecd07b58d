"""Rules between critic and algorithm; each check returns an error text, or None."""

from __future__ import annotations

from configs.tables.all_tables import AllTables

TOKEN_LEVEL = ("gae", "vtrace")
"""Advantages that are made of a critic's values."""


def critic_disagreements(settings: AllTables) -> list[str]:
    """List what is wrong about the critic, each with what to change."""
    checks = (
        _is_missing_or_idle,
        _counts_behaviour_twice_or_never,
        _whitens_groups,
        _centres_what_is_weighed,
        _trace_outlasts_targets,
        _shares_no_trunk,
        _never_trains_the_policy,
    )
    return [text for check in checks if (text := check(settings)) is not None]


def _is_missing_or_idle(settings: AllTables) -> str | None:
    advantage, kind = settings.algorithm.advantage, settings.critic.kind
    if (advantage in TOKEN_LEVEL) == (kind != "none"):
        return None
    if kind == "none":
        return (
            f"critic.kind must be head or model with algorithm.advantage = {advantage}, got none; "
            f"its advantages are measured against a critic's values"
        )
    return (
        f"critic.kind must be none with algorithm.advantage = {advantage}, got {kind}; "
        f"nothing would use its values: set algorithm.advantage to gae or vtrace"
    )


def _counts_behaviour_twice_or_never(settings: AllTables) -> str | None:
    algorithm = settings.algorithm
    if algorithm.advantage != "vtrace":
        return None
    if algorithm.proximal != "recomputed":
        return (
            f"algorithm.proximal must be recomputed with algorithm.advantage = vtrace, got "
            f"{algorithm.proximal}; V-trace has prox/mu in its advantages, so the surrogate's "
            f"ratio must be pi/prox: against mu, prox/mu would count twice"
        )
    if algorithm.correction != "none":
        return (
            f"algorithm.correction must be none with algorithm.advantage = vtrace, got "
            f"{algorithm.correction}; V-trace has prox/mu in its advantages, truncated at "
            f"critic.rho_bar, and would be weighed with it twice"
        )
    return None


def _whitens_groups(settings: AllTables) -> str | None:
    algorithm = settings.algorithm
    if algorithm.advantage not in TOKEN_LEVEL or algorithm.whiten != "group":
        return None
    return (
        f"algorithm.whiten must be none or batch with algorithm.advantage = "
        f"{algorithm.advantage}, got group; a critic, not a group, is the baseline"
    )


def _centres_what_is_weighed(settings: AllTables) -> str | None:
    algorithm = settings.algorithm
    if algorithm.advantage != "vtrace" or algorithm.whiten != "batch":
        return None
    return (
        "algorithm.whiten must be none with algorithm.advantage = vtrace, got batch; prox/mu is in "
        "its advantages, and a token that weighs nothing would get one of minus the mean"
    )


def _trace_outlasts_targets(settings: AllTables) -> str | None:
    critic = settings.critic
    if critic.c_bar <= critic.rho_bar:
        return None
    return (
        f"critic.c_bar must be <= critic.rho_bar = {critic.rho_bar}, got {critic.c_bar}; "
        f"lower it, or raise critic.rho_bar"
    )


def _shares_no_trunk(settings: AllTables) -> str | None:
    critic = settings.critic
    if critic.kind == "head" or not critic.trunk_gradient:
        return None
    return (
        f"critic.trunk_gradient must be false with critic.kind = {critic.kind}, got true; "
        f"only a head shares the policy's layers"
    )


def _never_trains_the_policy(settings: AllTables) -> str | None:
    warmup, steps = settings.critic.warmup_batches, settings.run.steps
    if settings.critic.kind == "none" or warmup < steps:
        return None
    return (
        f"critic.warmup_batches must be < run.steps = {steps}, got {warmup}; "
        f"the policy would never be trained"
    )
