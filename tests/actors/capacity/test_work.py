"""Seconds of work, from the tokens that an engine makes with few and with many episodes."""

import pytest

from actors.capacity import ENOUGH_S, WorkEstimator


def play(
    work: WorkEstimator, seconds: float, *, speed: float, episodes: int, is_full: bool = False
) -> float:
    """Let an engine make so many tokens a second; returns its seconds of work."""
    tokens = round(2 * speed)
    return sum(
        work.add(2.0, tokens, episodes=episodes, is_full=is_full) for _ in range(int(seconds / 2))
    )


def test_before_anything_is_known_an_engine_with_episodes_works() -> None:
    work = WorkEstimator()

    assert play(work, ENOUGH_S - 2, speed=10, episodes=1) == ENOUGH_S - 2
    assert play(WorkEstimator(), 60, speed=0, episodes=0) == 0.0


def test_half_of_the_episodes_are_half_of_the_work_where_they_are_half_of_the_tokens() -> None:
    work = WorkEstimator()
    play(work, 60, speed=400, episodes=64, is_full=True)

    assert play(work, 60, speed=100, episodes=16) == pytest.approx(15.0)
    assert play(work, 60, speed=0, episodes=0) == 0.0


def test_few_episodes_are_all_of_the_work_where_more_would_make_no_more_tokens() -> None:
    work = WorkEstimator()
    play(work, 60, speed=400, episodes=64, is_full=True)

    assert play(work, 60, speed=400, episodes=4) == pytest.approx(60.0)


def test_an_actor_without_room_works_whatever_its_episodes_wait_for() -> None:
    work = WorkEstimator()
    play(work, 60, speed=400, episodes=64)

    assert play(work, 60, speed=0, episodes=0, is_full=True) == 60.0


def test_an_engine_that_has_become_slower_works_all_of_the_time_again() -> None:
    work = WorkEstimator()
    play(work, 60, speed=400, episodes=64)
    play(work, 1100, speed=200, episodes=4)  # the minute of before counts for a quarter

    assert play(work, 60, speed=200, episodes=4) == pytest.approx(60.0)


def test_no_interval_has_more_work_than_time() -> None:
    work = WorkEstimator()
    play(work, 60, speed=1, episodes=4)  # the machine was busy with something else

    assert play(work, 10, speed=200, episodes=3) == 10.0


def test_a_short_burst_is_no_measure() -> None:
    work = WorkEstimator()
    play(work, 60, speed=100, episodes=4)
    play(work, ENOUGH_S - 2, speed=4000, episodes=64)

    assert play(work, 60, speed=100, episodes=4) == pytest.approx(60.0)


def test_half_a_minute_is_a_measure() -> None:
    work = WorkEstimator()
    work.add(2 * ENOUGH_S, 600, episodes=4, is_full=False)

    assert work.add(ENOUGH_S, 3000, episodes=64, is_full=False) == ENOUGH_S
