"""Shaped rewards against their formulas, and the parts of an episode that stay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from buffer.record.codec import encode_episode
from buffer.record.episode import Episode
from configs.settings import Settings
from learner.data.records import missing_parts, overlong, shape_reward
from learner.reporting.metrics import batch_figures
from tests.learner.support.made_episodes import make_episode
from tests.learner.support.tiny_run import tiny_settings

LIMIT = 8  # run.max_completion_tokens of the tiny run


def _settings(**rewards: object) -> Settings:
    return tiny_settings(Path("unused"), rewards=rewards)


def _episode(parts: Mapping[str, float], *, length: int = 2, reason: str = "stop") -> Episode:
    episode = make_episode(completion=[8] * length, reward=1.0, finish_reason=reason)
    return replace(episode, reward_parts=dict(parts))


def _shape(episode: Episode, settings: Settings) -> Episode:
    return shape_reward(episode, settings.rewards, max_completion_tokens=LIMIT)


def test_without_settings_an_episode_is_left_as_it_is() -> None:
    episode = _episode({"exact": 0.5}, length=LIMIT, reason="length")

    assert encode_episode(_shape(episode, _settings())) == encode_episode(episode)


def test_a_reward_is_the_weighted_sum_of_its_parts() -> None:
    episode = _episode({"exact": 1.0, "format": 0.5, "jokes": 9.0})

    shaped = _shape(episode, _settings(weights={"exact": 2.0, "format": -0.5}))

    assert shaped.reward == 2.0 * 1.0 - 0.5 * 0.5
    assert shaped.reward_parts == episode.reward_parts


def test_a_part_that_an_episode_lacks_counts_zero() -> None:
    settings = _settings(weights={"exact": 2.0, "tool": 1.0})

    assert _shape(_episode({"exact": 1.0}), settings).reward == 2.0


def test_a_weight_of_a_part_that_no_episode_has_is_named() -> None:
    episodes = [_episode({"exact": 1.0}), _episode({"exact": 1.0, "tool": 0.0})]

    assert missing_parts(episodes, _settings(weights={"tool": 1.0}).rewards) == ()
    assert missing_parts(episodes, _settings(weights={"exakt": 1.0}).rewards) == ("exakt",)


def test_overlong_punishment_is_piecewise_linear() -> None:
    limit, buffer = 100, 20

    assert [overlong(length, limit, buffer) for length in (1, 80, 85, 90, 100, 120)] == [
        0.0,
        0.0,
        -0.25,
        -0.5,
        -1.0,
        -1.0,
    ]


def test_overlong_punishment_is_a_part_of_the_reward_with_its_own_factor() -> None:
    settings = _settings(overlong_buffer_tokens=4, overlong_penalty=0.5)

    shaped = _shape(_episode({"exact": 1.0}, length=6), settings)

    assert shaped.reward == 1.0 - 0.5 * 2 / 4
    assert shaped.reward_parts == {"exact": 1.0, "overlong": -0.25}


def test_overlong_punishment_is_for_the_longest_path() -> None:
    settings = _settings(overlong_buffer_tokens=4, overlong_penalty=0.5)
    forked = make_episode(completion=[8] * 9, reward=1.0, branches=[(6, 3)])

    shaped = _shape(forked, settings)

    assert shaped.reward_parts["overlong"] == -0.25, "6 tokens, not 9"


def test_overlong_filtering_masks_what_was_cut_off_and_nothing_else() -> None:
    settings = _settings(overlong_filter=True)
    cut = _shape(_episode({}, length=LIMIT, reason="length"), settings)
    ended = _shape(_episode({}, length=LIMIT, reason="stop"), settings)

    assert not cut.completion.loss_mask.any()
    assert cut.reward == 1.0  # it still counts in its group
    assert ended.completion.loss_mask.all()


def test_figures_of_a_batch_count_masked_episodes_and_the_punishment() -> None:
    settings = _settings(overlong_filter=True, overlong_buffer_tokens=4)
    episodes = [
        _shape(_episode({"exact": 1.0}, length=LIMIT, reason="length"), settings),
        _shape(_episode({"exact": 1.0}, length=6), settings),
    ]

    figures = batch_figures(episodes, step=1, lineage=1, lineages={1: 0}, uses={})

    assert figures.masked_episodes == 1
    assert figures.trained_tokens == 6
    assert figures.reward_parts == {"exact": 1.0, "overlong": -0.75}
    assert figures.reward_mean == pytest.approx(1.0 - 0.75)
