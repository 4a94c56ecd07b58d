"""Settings that `run.deterministic` needs; returns texts with what to change.

Each rule is a setting, the value that it must have, and why another would let a bit of the run
depend on which process was how fast.
"""

from __future__ import annotations

from collections.abc import Iterator

from configs.tables.all_tables import AllTables

Value = str | int | float | bool | None

RULES: tuple[tuple[str, Value, str], ...] = (
    ("run.max_policy_lag", 0, "else the pace of actors decides which version samples a token"),
    ("actors.engine", "torch", "the last bits of vLLM's log-probs depend on what it batches"),
    ("actors.max_concurrent_episodes", 1, "rows that are computed together change last bits"),
    ("actors.threads", 1, "sums of several threads are taken in other orders"),
    ("actors.kv_on_swap", "keep", "a cache that is computed anew differs in its last bits"),
    ("buffer.margin", 1.0, "more groups than a batch trains would be sampled one version too soon"),
    ("buffer.on_stale", "drop", "episodes of other versions would be trained"),
    ("algorithm.filter_zero_variance", False, "a batch has its own groups and no others"),
    ("replay.capacity", 0, "which groups are there to train again depends on when they came"),
    ("learner.device", "cpu", "GPUs may take sums in any order"),
    ("learner.threads", 1, "sums of several threads are taken in other orders"),
    ("learner.compile", False, "kernels are chosen by how fast they are"),
    ("learner.min_ranks", None, "other ranks take sums in other orders"),
    ("learner.checkpoint_every", 1, "a learner that is killed would take back what was sampled"),
)


def deterministic_disagreements(settings: AllTables) -> list[str]:
    """List settings under which two runs would not be equal bit for bit."""
    return list(_broken(settings)) if settings.run.deterministic else []


def _broken(settings: AllTables) -> Iterator[str]:
    for name, value, why in RULES:
        table, _, key = name.partition(".")
        got: Value = getattr(getattr(settings, table), key)
        if got != value:
            yield (
                f"{name} must be {_shown(value)} with run.deterministic, got {_shown(got)}; {why} "
                f"(docs/same-again.md)"
            )


def _shown(value: Value) -> str:
    """Write a value as YAML does."""
    return (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )
