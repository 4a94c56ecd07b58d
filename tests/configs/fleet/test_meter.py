"""From looks at actors and times of batches to averages."""

import pytest

from configs.fleet import Meter


def test_nothing_is_measured_before_two_looks_and_a_batch():
    meter = Meter()

    assert meter.batch(wait_s=0.0, span_s=10.0) is None
    meter.observe_busy_time(0.0, {"a": 0.0})
    assert meter.batch(wait_s=1.0, span_s=10.0) is None
    meter.observe_busy_time(10.0, {"a": 5.0}, version_s=2.0)
    measured = meter.batch(wait_s=4.0, span_s=10.0)

    assert measured is not None
    assert (measured.actors, measured.busy, measured.version_s) == (1.0, 0.5, 2.0)
    assert measured.idle == pytest.approx(5 / 30)
    assert measured.step_s == pytest.approx(25 / 3)


def test_actors_that_come_and_go_count_for_their_time_and_not_as_resting():
    meter = Meter()
    meter.observe_busy_time(0.0, {"a": 50.0, "b": 7.0})
    meter.observe_busy_time(10.0, {"a": 60.0, "c": 0.0, "d": 1.0})

    measured = meter.batch(wait_s=0.0, span_s=10.0)

    assert measured is not None
    assert (measured.actors, measured.busy) == (2.5, 1.0)


def test_an_actor_that_began_anew_under_its_name_was_not_busy_for_less_than_no_time():
    meter = Meter()
    meter.observe_busy_time(0.0, {"a": 500.0})
    meter.observe_busy_time(10.0, {"a": 3.0})

    measured = meter.batch(wait_s=0.0, span_s=10.0)

    assert measured is not None
    assert measured.busy == 0.0


def test_what_was_two_minutes_ago_is_forgotten_but_for_three_batches():
    meter = Meter()
    meter.observe_busy_time(0.0, {"a": 0.0})
    for k in range(1, 41):
        meter.observe_busy_time(10.0 * k, {"a": 0.0 if k <= 20 else 10.0 * (k - 20)})
        measured = meter.batch(wait_s=10.0 if k <= 20 else 0.0, span_s=10.0)

    assert measured is not None
    assert (measured.busy, measured.idle) == (1.0, 0.0)

    for k, wait_s in enumerate((200.0, 100.0, 0.0), start=1):
        meter.observe_busy_time(400.0 + 200.0 * k, {"a": 0.0})
        measured = meter.batch(wait_s=wait_s, span_s=200.0)
    assert measured is not None
    assert measured.idle == 0.5


def averaged(*batches: tuple[float, float]) -> float:
    """The idle share after batches of such waits and spans, with one actor."""
    meter, now_s = Meter(), 0.0
    meter.observe_busy_time(now_s, {"a": 0.0})
    for wait_s, span_s in batches:
        now_s += span_s
        meter.observe_busy_time(now_s, {"a": now_s})
        measured = meter.batch(wait_s=wait_s, span_s=span_s)
    assert measured is not None
    assert measured.version_s == 0.0
    return measured.idle


def test_batches_are_kept_as_long_as_those_after_them_do_not_fill_two_minutes():
    waiting, thirty = (30.0, 30.0), (0.0, 30.0)

    assert averaged(waiting, *[thirty] * 4) == 0.2
    assert averaged(waiting, *[thirty] * 5) == 0.0
    assert averaged((60.0, 60.0), (0.0, 10.0), (0.0, 50.0), (0.0, 50.0)) == pytest.approx(6 / 17)


def test_actors_of_which_none_was_there_twice_measure_nothing_and_neither_does_no_time():
    meter = Meter()
    meter.observe_busy_time(0.0, {"a": 0.0})
    meter.observe_busy_time(10.0, {"b": 0.0})

    assert meter.batch(wait_s=0.0, span_s=10.0) is None
    timeless = Meter()
    timeless.observe_busy_time(0.0, {"a": 0.0})
    timeless.observe_busy_time(10.0, {"a": 10.0})
    assert timeless.batch(wait_s=0.0, span_s=0.0) is None
