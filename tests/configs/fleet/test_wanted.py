"""The number of actors that a run wants: from figures to a number and its reason."""

import pytest

from configs.errors import SettingsError
from configs.fleet import (
    FleetMeasurements,
    WantedActors,
    actors_to_feed,
    affordable_actors,
    cost,
    first_wanted,
    next_wanted,
    overspent,
)
from configs.loader import load
from configs.settings import FleetSettings, Settings

LATER = 10_000.0


def settings(**tables: dict[str, object]) -> Settings:
    run = {"model": "m", **tables.pop("run", {})}
    return Settings.model_validate({"run": run, **tables})


def measured(**figures: float) -> FleetMeasurements:
    usual = {"actors": 4.0, "busy": 1.0, "idle": 0.0, "step_s": 10.0}
    return FleetMeasurements(**usual | figures)


def after(
    before: int, figures: FleetMeasurements, of: Settings, *, held_s: float = LATER
) -> WantedActors:
    return next_wanted(WantedActors(before, "", 0.0), figures, of, now_s=held_s)


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


def test_a_number_that_is_right_is_not_decided_anew():
    kept = after(4, measured(busy=0.5, idle=0.5), settings())

    assert (kept.actors, kept.since_s) == (4, 0.0)


def test_the_bearable_idleness_wants_nobody_and_a_little_more_does():
    assert after(10, measured(actors=10, idle=0.03), settings()).actors == 10
    assert after(10, measured(actors=10, idle=0.031), settings()).actors == 11


def test_too_many_actors_are_wanted_less_though_the_learner_waits_for_something_else():
    figures = measured(actors=24, busy=0.3, idle=0.1)

    assert after(24, figures, settings()).actors == 9


def test_the_fewest_that_are_worth_a_change_are_those_of_the_constant():
    assert after(20, measured(actors=20, busy=0.77), settings()).actors == 17  # 0.85 x 20
    assert after(20, measured(actors=20, busy=0.80), settings()).actors == 20


def test_a_learner_that_only_waits_and_a_clock_that_stood_still_want_sixteen_times_as_many():
    assert after(4, measured(idle=1.0), settings()).actors == 70
    assert actors_to_feed(4, span_s=1.0, least_s=0.0) == 70


def test_the_time_of_weights_counts_only_where_there_is_one():
    assert "a version" not in after(4, measured(step_s=0.01), settings()).reason


def test_a_bound_is_named_where_it_is_met_and_only_there():
    def reason(before: int, fleet: dict[str, object], **figures: float) -> str:
        return after(before, measured(**figures), settings(fleet=fleet)).reason

    plain = "learner idle 31%, actors busy 100%"
    assert reason(4, {"max_actors": 6}, idle=0.31) == plain
    assert reason(4, {"max_actors": 5}, idle=0.31) == f"{plain}; 6 but for fleet.max_actors 5"
    assert reason(5, {"max_actors": 5}, idle=0.31) == f"{plain}; 6 but for fleet.max_actors 5"
    bound = "learner idle 0%, actors busy 100%; 6 but for fleet.max_actors 5"
    assert reason(5, {"max_actors": 5}, actors=5) == bound
    rest = "learner idle 0%, actors busy 10%"
    assert reason(9, {"min_actors": 3}, busy=0.1) == f"{rest}; 1 but for fleet.min_actors"
    assert reason(9, {"min_actors": 1}, busy=0.1) == rest
    assert after(9, measured(busy=0.1), settings(fleet={"min_actors": 3})).actors == 3
    soon = next_wanted(
        WantedActors(8, "", 0.0), measured(busy=0.1), settings(fleet={"min_actors": 3}), now_s=1.0
    )
    assert (soon.actors, soon.reason) == (8, rest)


def test_what_an_hour_pays_for_is_counted_without_losing_one_to_rounding():
    fleet = settings(fleet={"price_per_actor_hour": 0.1, "max_per_hour": 0.3}).fleet

    assert affordable_actors(fleet) == 3
    assert affordable_actors(FleetSettings(max_per_hour=1)) is None
    assert affordable_actors(FleetSettings(price_per_actor_hour=1)) is None


def test_nothing_is_overspent_without_a_price_or_without_a_budget():
    assert overspent(FleetSettings(max_total=1), 1e9) is None
    assert overspent(FleetSettings(price_per_actor_hour=1), 1e9) is None
