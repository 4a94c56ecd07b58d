"""Settings of actors that contradict each other are refused."""

import pytest
from pydantic import ValidationError

from configs.settings import Settings


def actors(**keys: object) -> Settings:
    return Settings.model_validate({"run": {"model": "m"}, "actors": keys})


@pytest.mark.parametrize(
    ("keys", "answer"),
    [
        (
            {"least_concurrent_episodes": 9, "most_concurrent_episodes": 8},
            "least_concurrent_episodes must be <= actors.most_concurrent_episodes = 8, got 9",
        ),
        (
            {"max_concurrent_episodes": "auto", "engine": "torch"},
            "max_concurrent_episodes must be a number with actors.engine torch, .* got auto",
        ),
        (
            {"max_concurrent_episodes": "auto", "max_episodes_in_flight": 9},
            "max_episodes_in_flight must be null where .* is auto, got 9",
        ),
        ({"max_concurrent_episodes": "most"}, "max_concurrent_episodes"),
    ],
)
def test_numbers_of_episodes_that_cannot_be_are_refused(keys, answer):
    with pytest.raises(ValidationError, match=answer):
        actors(**keys)


def test_the_most_that_an_engine_ever_has():
    assert actors(max_concurrent_episodes=7).actors.slots == 7
    assert actors(max_concurrent_episodes="auto", most_concurrent_episodes=99).actors.slots == 99
