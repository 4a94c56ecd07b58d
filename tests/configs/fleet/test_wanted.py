"""The number of actors that a run wants: from figures to a number and its reason."""

import pytest

from configs.errors import SettingsError
from configs.fleet.cost import cost, overspent
from configs.fleet.wanted import Measured, Wanted, actors_to_feed, first_wanted, next_wanted
from configs.loader import load
from configs.settings import Settings

LATER = 10_000.0


def settings(**tables: dict[str, object]) -> Settings:
    run = {"model": "m", **tables.pop("run", {})}
    return Settings.model_validate({"run": run, **tables})


def measured(**figures: float) -> Measured:
    usual = {"actors": 4.0, "busy": 1.0, "idle": 0.0, "step_s": 10.0}
    return Measured(**usual | figures)


def after(before: int, figures: Measured, of: Settings, *, held_s: float = LATER) -> Wanted:
    return next_wanted(Wanted(before, "", 0.0), figures, of, now_s=held_s)


def test_a_learner_that_waits_wants_as_many_more_as_it_waits():
    wanted = after(4, measured(idle=0.31), settings())

    assert wanted.actors == 6  # 4 / 0.69 = 5.8, and no room for a tenth more
    assert wanted.reason == "learner idle 31%, actors busy 100%"


def test_actors_that_rest_are_too_many():
    assert after(10, measured(actors=10, busy=0.5), settings()).actors == 6


def test_actors_that_are_missing_are_wanted_back_and_no_more():
    assert after(8, measured(actors=4, idle=0.5), settings()).actors == 8 + 1


def test_actors_that_rest_while_the_learner_waits_are_not_too_few():
    assert after(4, measured(busy=0.5, idle=0.5), settings()).actors == 4


@pytest.mark.parametrize(
    ("figures", "held_s", "number"),
    [
        (measured(idle=0.5), 119.0, 4),
        (measured(idle=0.5), 120.0, 9),
        (measured(busy=0.2), 599.0, 4),
        (measured(busy=0.2), 600.0, 1),
        (measured(idle=0.02), LATER, 4),
        (measured(busy=0.9), LATER, 4),
    ],
)
def test_a_number_changes_seldom_and_never_for_little(figures, held_s, number):
    wanted = after(4, figures, settings(), held_s=held_s)

    assert wanted.actors == number
    assert wanted.since_s == (0.0 if number == 4 else held_s)


def test_idleness_for_the_sake_of_weights_wants_no_actors():
    of = settings(run={"max_policy_lag": 1})

    assert after(4, measured(idle=0.5, step_s=10, version_s=20), of).actors == 9
    wanted = after(4, measured(idle=0.5, step_s=10, version_s=40), of)

    assert wanted.actors == 4
    assert "a version takes 40 s to be everywhere" in wanted.reason


def test_no_more_are_wanted_than_may_be_and_the_reason_is_the_bound():
    figures = measured(actors=4, idle=0.9)

    for tables, number, why in (
        ({"fleet": {"max_actors": 20}}, 20, "44 but for fleet.max_actors 20"),
        (
            {"fleet": {"price_per_actor_hour": 2.0, "max_per_hour": 15.0}},
            7,
            "44 but for fleet.max_per_hour 15.0",
        ),
        (
            {"run": {"max_policy_lag": 0, "groups_per_batch": 2, "group_size": 4}},
            8,
            "44 but for run.max_policy_lag 0 admits 8 episodes at a time",
        ),
    ):
        wanted = after(4, figures, settings(**tables))
        assert (wanted.actors, why in wanted.reason) == (number, True), wanted


def test_a_bound_that_was_lowered_holds_at_once():
    wanted = after(9, measured(actors=9), settings(fleet={"max_actors": 5}), held_s=1.0)

    assert wanted.actors == 5


def test_before_the_first_batch_as_many_as_the_settings_start():
    assert first_wanted(settings(actors={"count": 3})).actors == 3
    assert first_wanted(settings(actors={"count": 0}, fleet={"min_actors": 2})).actors == 2
    assert "actors.count" in first_wanted(settings()).reason


def test_the_learners_need_is_met_within_its_bearable_idleness():
    for actors in range(1, 300):
        for share in (0.0, 0.02, 0.31, 0.6):
            needed = actors / (1 - share)
            wanted = actors_to_feed(actors, span_s=1.0, least_s=1 - share)
            assert needed * 0.97 <= wanted <= max(needed * 1.1 + 0.5, needed + 1)


def test_a_budget_is_spent_when_its_actors_have_cost_it():
    fleet = settings(fleet={"price_per_actor_hour": 2.5, "max_total": 10}).fleet

    assert cost(fleet, 2 * 3600) == 5.0
    assert overspent(fleet, 4 * 3600 - 1) is None
    assert "have cost, 10.00, to train on, got 10; raise it" in str(overspent(fleet, 4 * 3600))
    assert cost(settings().fleet, 3600) is None


@pytest.mark.parametrize(
    ("fleet", "text"),
    [
        ({"min_actors": 9, "max_actors": 3}, "fleet.min_actors must be <= fleet.max_actors = 3"),
        ({"max_total": 9}, "price_per_actor_hour must be set where fleet.max_total is, got null"),
        (
            {"min_actors": 3, "price_per_actor_hour": 2, "max_per_hour": 5},
            "fleet.max_per_hour must be >= .* = 6, got 5",
        ),
    ],
)
def test_bounds_that_contradict_each_other_are_refused(tmp_path, fleet, text):
    file = tmp_path / "mine.yaml"
    file.write_text(f"run: {{model: m}}\nfleet: {fleet}\n")

    with pytest.raises(SettingsError, match=text):
        load(file)
