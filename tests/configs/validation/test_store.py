"""Settings that need more than Redis can hold, or that make groups unreachable, are refused."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from configs.settings import Settings
from configs.validation.store import MIB, memory_shortage


def make(**tables: dict[str, object]) -> Settings:
    """Make settings of a run from some keys."""
    return Settings.model_validate({**tables, "run": {"model": "init", **tables.get("run", {})}})


@pytest.mark.parametrize(
    ("tables", "answer"),
    [
        (
            {"replay": {"capacity": 7}, "run": {"group_size": 8}},
            "replay.capacity must be 0 or >= run.group_size = 8, got 7; groups are kept whole",
        ),
        (
            {"replay": {"capacity": 8, "max_lag": 9}, "learner": {"checkpoint_every": 10}},
            "replay.max_lag must be >= learner.checkpoint_every = 10, got 9",
        ),
        (
            {"replay": {"capacity": 8, "sampling": "prioritised"}, "run": {"group_size": 1}},
            "replay.priority must be lag where run.group_size is 1, got advantage",
        ),
        (
            {"run": {"groups_per_batch": 512, "group_size": 16, "max_completion_tokens": 32768}},
            (
                r"1536 groups x 16 episodes x 294 KiB = 7056 MiB under way \+ 512 MiB trained "
                "and not committed within buffer.pause_at_memory = 0.8 of it, got 1024 MiB; raise"
            ),
        ),
        (
            {"run": {"groups_per_batch": 64, "group_size": 16}, "buffer": {"max_run_bytes": MIB}},
            (
                r"max_run_bytes must hold 192 groups x 16 episodes x .* MiB under way \+ 0.6 MiB "
                r"trained and not committed \+ 0.0 MiB kept for replay, got 1.0 MiB, under which"
            ),
        ),
    ],
)
def test_what_redis_cannot_hold_is_refused_with_figures(
    tables: dict[str, dict[str, object]], answer: str
) -> None:
    with pytest.raises(ValidationError, match=answer):
        make(**tables)


@pytest.mark.parametrize(
    "tables",
    [
        {"replay": {"capacity": 8, "max_lag": 10}, "learner": {"checkpoint_every": 10}},
        {"replay": {"max_lag": 9}, "learner": {"checkpoint_every": 10}},
        {"replay": {"capacity": 8, "sampling": "newest"}, "run": {"group_size": 1}},
        {"run": {"groups_per_batch": 64}, "buffer": {"max_run_bytes": 2**28}},
        {"run": {"groups_per_batch": 8192}, "buffer": {"url": "redis://there:6379/0"}},
    ],
)
def test_what_comes_about_is_taken(tables: dict[str, dict[str, object]]) -> None:
    make(**tables)


def test_a_server_of_its_own_is_judged_by_its_own_limit() -> None:
    settings = make(run={"groups_per_batch": 512}, buffer={"url": "redis://there:6379/0"})

    assert memory_shortage(settings.run, settings.buffer, 0) is None
    assert memory_shortage(settings.run, settings.buffer, 4096 * MIB) is None
    text = memory_shortage(settings.run, settings.buffer, 600 * MIB)

    assert text is not None
    assert "1536 groups x 8 episodes x 15 KiB = 180 MiB under way + 360 MiB trained" in text
