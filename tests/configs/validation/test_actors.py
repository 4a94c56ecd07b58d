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
            "max_concurrent_episodes must be a number or null with actors.engine torch, got auto",
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
    assert actors().actors.slots == 256
    assert actors(max_concurrent_episodes=7).actors.slots == 7
    assert actors(max_concurrent_episodes="auto", most_concurrent_episodes=99).actors.slots == 99


SHARING = {"share_endpoint": "tcp://127.0.0.1:0"}


@pytest.mark.parametrize(
    ("keys", "answer"),
    [
        (
            {"site": "eu"},
            r"share_endpoint must be set where actors\.site is eu, got null; the other",
        ),
        (
            {"site": "eu", **SHARING, "pull_from": ["memory", "publisher"]},
            r"pull_from must have peers where actors\.site is eu, got memory, publisher; put peers",
        ),
        ({"site": "", **SHARING}, "site"),
        ({"site": "e u", **SHARING}, "site"),
    ],
)
def test_a_site_whose_actors_could_not_take_weights_from_each_other_is_refused(keys, answer):
    with pytest.raises(ValidationError, match=answer):
        actors(**keys)


def test_an_actor_of_a_site_shares_and_asks_its_peers():
    assert actors(site="eu-west.1", **SHARING).actors.site == "eu-west.1"
    assert actors().actors.site is None
