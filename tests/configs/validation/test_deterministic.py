"""Settings under which two runs would not be equal bit for bit."""

from __future__ import annotations

from typing import Any

import pytest

from configs.settings import Settings
from configs.validation.learner import RULES

REPEATABLE: dict[str, dict[str, Any]] = {
    "run": {
        "model": "init",
        "environment": "calculator",
        "deterministic": True,
        "max_policy_lag": 0,
    },
    "actors": {"engine": "torch", "max_concurrent_episodes": 1},
    "learner": {"device": "cpu", "checkpoint_every": 1},
}

OTHERS: dict[str, Any] = {
    "run.max_policy_lag": 1,
    "actors.engine": "vllm",
    "actors.max_concurrent_episodes": 2,
    "actors.threads": 2,
    "actors.kv_on_swap": "recompute",
    "buffer.margin": 1.5,
    "buffer.on_stale": "train",
    "algorithm.filter_zero_variance": True,
    "replay.capacity": 64,
    "learner.device": "auto",
    "learner.threads": 2,
    "learner.compile": True,
    "learner.min_ranks": 1,
    "learner.checkpoint_every": 2,
}


def _with(name: str, value: object, *, deterministic: bool) -> dict[str, Any]:
    tables = {table: dict(keys) for table, keys in REPEATABLE.items()}
    tables["run"]["deterministic"] = deterministic
    table, _, key = name.partition(".")
    tables.setdefault(table, {})[key] = value
    return tables


def test_a_run_that_repeats_itself_is_accepted() -> None:
    assert Settings.model_validate(REPEATABLE).run.deterministic


@pytest.mark.parametrize("name", [name for name, _, _ in RULES])
def test_what_would_let_bits_differ_is_refused_by_its_name(name: str) -> None:
    value = OTHERS[name]
    text = rf"{name} must be \S+ with run\.deterministic, got {str(value).lower()}; "
    with pytest.raises(ValueError, match=text):
        Settings.model_validate(_with(name, value, deterministic=True))

    Settings.model_validate(_with(name, value, deterministic=False))
