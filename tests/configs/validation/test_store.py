"""Settings that need more than Redis can hold, or that make groups unreachable, are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pydantic import ValidationError

from buffer.record.codec import encode_episode
from buffer.record.episode import PolicyVersion
from configs.settings import Settings
from configs.validation.store import BYTES_BESIDE_TOKENS, MIB, memory_shortage
from tests.learner.support.made_episodes import make_episode


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
        (
            {"run": {"max_completion_tokens": 131072}, "buffer": {"max_episode_bytes": 2**20}},
            (
                r"buffer.max_episode_bytes must be >= 1249280 for run.max_prompt_tokens = 1024 and "
                r"run.max_completion_tokens = 131072, got 1048576, which the longest episode would "
                r"exceed once it is sampled; raise it to 1249280"
            ),
        ),
        (
            {"run": {"max_completion_tokens": 2**21}, "buffer": {"maxmemory_mb": 2**20}},
            r"; lower run.max_completion_tokens to 1856398, with 16777216 here",
        ),
        (
            {"run": {"max_prompt_tokens": 2**23}, "buffer": {"maxmemory_mb": 2**20}},
            "exceed once it is sampled; lower run.max_prompt_tokens",
        ),
        (
            {"broker": {"max_message_bytes": 2**24}},
            (
                r"broker.max_message_bytes must be >= buffer.max_episode_bytes \+ 65536 = "
                "16842752, got 16777216; the largest episode would cut its actor's connection"
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


def test_an_episode_whose_settings_are_taken_is_never_too_large() -> None:
    run = make(run={"max_prompt_tokens": 16, "max_completion_tokens": 512}).run
    least = BYTES_BESIDE_TOKENS + 4 * run.max_prompt_tokens + 9 * run.max_completion_tokens
    made = make(run=run.model_dump(), buffer={"max_episode_bytes": least}).buffer
    names = [f"{number:02}" + "\U00020000" * 98 for number in range(64)]  # of four bytes each
    versions = [(PolicyVersion(2**20, 2**20 + number), number) for number in range(200)]

    episode = make_episode(2**40, prompt=range(16), completion=range(512), versions=versions)
    large = replace(
        episode,
        reward_parts=dict.fromkeys(names, 0.5),
        environment_metrics=dict.fromkeys(names, 0.5),
        metadata={"answer": "\U00020000" * 400},
    )

    record = encode_episode(large, max_bytes=made.max_episode_bytes)

    assert len(record) > 58 * 1024
    with pytest.raises(ValidationError, match=r"buffer.max_episode_bytes must be >= "):
        make(run=run.model_dump(), buffer={"max_episode_bytes": least - 1})
    taught: dict[str, object] = {"teacher": "a model", "teacher_in": "actor"}
    with pytest.raises(ValidationError, match=f"must be >= {least + 4 * 512} for"):
        make(run=run.model_dump(), buffer={"max_episode_bytes": least}, algorithm=taught)
