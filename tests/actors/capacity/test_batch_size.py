"""The number of episodes that is found, in engines whose memory or speed has a limit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from actors.capacity import HELD_S, LATEST, WINDOW_S, BatchSize, KvCacheState
from tests.actors.capacity.support.stand_in_engine import StandInEngine, on_a_cpu, on_a_gpu


@dataclass
class Windows:
    """Gives a size one window after the other, from that of its first look at 0 s on."""

    size: BatchSize
    now_s: float = 0.0
    tokens: int = 0
    evicted: int = 0
    ended: int = 0

    def __post_init__(self) -> None:
        self._look(0.0, is_full=False, used=0.0)

    def give(
        self,
        tokens: int = 0,
        *,
        used: float = 0.4,
        evicted: int = 0,
        ended: int = 0,
        looks: int = 1,
        full: int = 1,
        over: int = 0,
        seconds: float = WINDOW_S,
    ) -> int:
        """Make so many tokens in a window; returns the number.

        The last `full` of its looks are full, the last `over` of them see more than the number.
        """
        self.tokens += tokens
        self.evicted += evicted
        self.ended += ended
        began_s, self.now_s = self.now_s, self.now_s + seconds
        for look in range(1, looks + 1):
            now_s = began_s + look * seconds / looks
            self._look(now_s, is_full=look > looks - full, used=used, is_over=look > looks - over)
        return self.size.number

    def _look(self, now_s: float, *, is_full: bool, used: float, is_over: bool = False) -> None:
        self.size.update_number(
            now_s,
            tokens=self.tokens,
            ended=self.ended,
            is_full=is_full,
            is_over=is_over,
            memory=KvCacheState(used, self.evicted),
        )


@pytest.mark.parametrize("speed", [on_a_gpu, on_a_cpu])
@pytest.mark.parametrize("fits", [6, 20, 90, 700, 4000])
def test_what_is_found_is_within_a_tenth_of_the_best(
    speed: Callable[[int], float], fits: int
) -> None:
    size, engine = BatchSize(4, 1024), StandInEngine(speed, fits)

    engine.run(size, 600)

    assert engine.rate(size.number) >= 0.9 * engine.best(size), size
    seconds = engine.numbers.index(size.number)
    assert seconds < 300, engine.numbers[::10]


def test_nobody_is_evicted_on_the_way_up_nor_where_the_number_has_settled() -> None:
    size, engine = BatchSize(4, 1024), StandInEngine(on_a_gpu, fits=50)

    engine.run(size, 300 + HELD_S)

    assert engine.evicted == 0
    assert 40 <= size.number <= 50


def test_longer_answers_lower_the_number_and_shorter_ones_raise_it_again() -> None:
    size, engine = BatchSize(4, 1024), StandInEngine(on_a_gpu, fits=100)
    engine.run(size, 300)
    engine.fits = 40
    engine.run(size, 200)
    assert 30 <= size.number <= 40
    assert "lost their KV cache in 10 s" in size.reason

    engine.fits = 100
    engine.run(size, 2 * HELD_S)

    assert 80 <= size.number <= 100


def test_an_actor_that_is_given_too_little_does_not_change_its_number() -> None:
    size, engine = BatchSize(4, 1024), StandInEngine(on_a_gpu, fits=100)

    engine.run(size, 300, is_full=False)

    assert size.number == 4


def test_evictions_are_a_reason_where_they_are_many_for_the_episodes_that_end() -> None:
    def number_after(evicted: int, ended: int) -> int:
        windows = Windows(BatchSize(8, 100))
        for step in range(4):
            windows.give(1000 * 2**step)
        return windows.give(evicted=evicted, ended=ended, used=1.0, full=0)

    assert number_after(evicted=2, ended=0) == 100
    assert number_after(evicted=3, ended=0) == 80
    assert number_after(evicted=12, ended=100) == 100
    assert number_after(evicted=13, ended=100) == 80


def test_the_bounds_hold() -> None:
    size, engine = BatchSize(4, 30), StandInEngine(on_a_gpu, fits=1000)
    engine.run(size, 600)
    assert size.number == 30

    size, engine = BatchSize(16, 64), StandInEngine(on_a_gpu, fits=5)
    engine.run(size, 600)
    assert set(engine.numbers) == {16}
    assert size.reason == "nothing is measured yet"

    assert Windows(BatchSize(100, 103)).give(1000) == 103
    assert Windows(BatchSize(100, 102)).give(1000) == 100, "no two in a hundred can make three more"


def test_what_made_no_more_tokens_is_not_tried_again_for_a_while() -> None:
    size, engine = BatchSize(4, 1024), StandInEngine(on_a_cpu, fits=5000)
    engine.run(size, 120)
    assert size.number == 16
    assert size.reason == "32 made no more tokens"

    engine.run(size, HELD_S - 80)

    assert set(engine.numbers[120:]) == {16}
    engine.run(size, 60)
    assert 32 in engine.numbers[120:]


def test_a_step_up_goes_back_after_three_windows_without_three_hundredths_more() -> None:
    def numbers(*tokens: int) -> list[int]:
        windows = Windows(BatchSize(4, 1024))
        return [windows.give(each) for each in (1000, *tokens)]

    assert numbers(1030) == [8, 16]
    assert numbers(1029, 1030) == [8, 8, 16]
    assert numbers(0, 1029, 1029) == [8, 8, 8, 4]
    assert numbers(0, 1029, 1031) == [8, 8, 8, 16]


def test_a_window_that_ends_late_counts_its_seconds() -> None:
    windows = Windows(BatchSize(4, 1024))
    assert windows.give(1000) == 8

    assert windows.give(2040, seconds=2 * WINDOW_S) == 8
    assert windows.give(2080, seconds=2 * WINDOW_S) == 16


def test_fewer_stay_where_an_actor_that_was_not_full_lost_many() -> None:
    windows = Windows(BatchSize(50, 100))
    assert windows.give(1000) == 100
    assert windows.give(2000, evicted=20, full=0) == 80

    assert {windows.give(5) for _ in range(5)} == {80}


def test_a_step_back_is_taken_back_where_the_fewer_made_more_only_for_a_while() -> None:
    windows = Windows(BatchSize(32, 53))
    tokens = (9500, 9700, 9700, 9700, 8400, 9700)

    numbers = [windows.give(each, used=0.57) for each in tokens]

    assert numbers == [53, 53, 53, 32, 53, 53]
    assert windows.size.reason == "32 made fewer tokens"


def test_a_window_counts_where_three_quarters_of_its_looks_were_full() -> None:
    for full, number in ((6, 8), (5, 4)):
        windows = Windows(BatchSize(4, 1024))

        assert windows.give(1000, looks=8, full=full) == number


def test_after_evictions_nothing_is_tried_for_a_while() -> None:
    windows = Windows(BatchSize(4, 100))
    assert [windows.give(1000 * 2**step) for step in range(5)] == [8, 16, 32, 64, 100]

    assert windows.give(1000, evicted=3) == 80
    assert windows.size.reason == "3 episodes lost their KV cache in 10 s"
    held = [windows.give(1000) for _ in range(round(HELD_S / WINDOW_S) - 1)]
    assert set(held) == {80}
    assert windows.give(1000) == 100


def test_where_fewer_made_less_evictions_are_borne_until_it_is_time_to_try_again() -> None:
    windows = Windows(BatchSize(50, 100))
    assert windows.give(1000) == 100
    assert windows.give(2000, evicted=20) == 80

    assert windows.give(1900, used=0.9) == 100
    borne = [windows.give(2000, evicted=20) for _ in range(round(HELD_S / WINDOW_S) - 1)]

    assert set(borne) == {100}
    assert windows.give(2000, evicted=20) == 80


def test_what_was_made_before_the_evictions_does_not_count() -> None:
    windows = Windows(BatchSize(50, 100))
    assert [windows.give(tokens) for tokens in (1000, 2000, 2000, 2000)] == [100] * 4
    assert windows.give(1000, evicted=20) == 80

    assert [windows.give(1000, used=0.9) for _ in range(5)] == [80] * 5


def test_nothing_is_measured_while_more_than_the_number_run() -> None:
    windows = Windows(BatchSize(50, 100))
    assert windows.give(1000) == 100
    assert windows.give(2000, evicted=20) == 80

    assert [windows.give(5, evicted=20, looks=4, full=4, over=4) for _ in range(3)] == [80] * 3
    assert windows.give(2000, looks=4, full=4, over=1) == 80
    assert windows.give(2000) == 80
    assert windows.give(0, evicted=20) == 64


def test_a_number_is_compared_with_the_one_below_by_its_latest_windows() -> None:
    windows = Windows(BatchSize(8, 16))
    assert windows.give(1000) == 16
    assert {windows.give(1200) for _ in range(2 * LATEST)} == {16}

    slower = [windows.give(900) for _ in range(5)]

    assert slower == [16, 16, 16, 16, 8]
    assert windows.give(1000) == 8, "16 made 2 % more"
    assert windows.give(900) == 16


def test_a_cache_that_is_just_full_does_not_hold_the_next_step_up() -> None:
    windows = Windows(BatchSize(8, 64))

    assert [windows.give(1000, used=0.97) for _ in range(4)] == [8] * 4
    assert windows.give(1000, used=0.4) == 16
    assert windows.give(1030, used=0.4) == 32, "its first window counts in full"
