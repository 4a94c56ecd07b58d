"""Rules between settings of the learner; each check returns an error text, or None."""

from __future__ import annotations

from configs.tables.all_tables import AllTables


def learner_disagreements(settings: AllTables) -> list[str]:
    """List what is wrong about the learner, each with what to change."""
    checks = (_orthogonalises_on_the_host, _offloads_too_much, _keeps_what_is_compiled)
    return [text for check in checks if (text := check(settings)) is not None]


def _orthogonalises_on_the_host(settings: AllTables) -> str | None:
    learner = settings.learner
    if learner.optimizer != "muon" or "parameters" not in learner.offload:
        return None
    return (
        "learner.offload must not have parameters with learner.optimizer = muon, got both; its "
        "matrix products would run on the CPU: choose adamw"
    )


def _offloads_too_much(settings: AllTables) -> str | None:
    kept = settings.learner.activation_checkpointing
    if "activations" not in settings.learner.offload or kept in (None, "full"):
        return None
    return (
        "learner.activation_checkpointing must be full where learner.offload has activations, got "
        f"{kept}; more than the inputs of layers would take longer to copy than to compute again"
    )


def _keeps_what_is_compiled(settings: AllTables) -> str | None:
    if not settings.learner.compile or settings.learner.activation_checkpointing != "selective":
        return None
    return (
        "learner.activation_checkpointing must be none or full with learner.compile, got "
        "selective; it chooses among operations that are compiled into one"
    )
