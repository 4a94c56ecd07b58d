"""The digest of a batch differs wherever a bit of what is trained does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from buffer.record.episode import Episode
from learner.reporting.batch_log import batch_digest
from tests.learner.support.made_episodes import make_episode

LAST_BIT = -1.0000001
"""The float32 beside -1."""


def _pair(**changes: object) -> list[Episode]:
    return [make_episode(0), make_episode(1, **{"reward": 0.5, **changes})]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": (5, 6, 8)},
        {"completion": (8, 7)},
        {"logprobs": (-1.0, LAST_BIT)},
        {"mask": (1, 0), "logprobs": (-1.0, -1.0)},
        {"reward": 0.5000000000000001},
        {"branches": [(1, 0)]},
    ],
    ids="-".join,
)
def test_a_bit_of_an_episode_changes_the_digest(changes: dict[str, object]) -> None:
    assert batch_digest(_pair(**changes)) != batch_digest(_pair())


def test_the_order_of_episodes_changes_the_digest() -> None:
    assert batch_digest(_pair()[::-1]) != batch_digest(_pair())


def test_who_sampled_and_when_does_not_change_the_digest() -> None:
    one, other = _pair()
    elsewhere = replace(other, incarnation="another", finished_at=7.0)

    assert batch_digest([one, elsewhere]) == batch_digest([one, other])
