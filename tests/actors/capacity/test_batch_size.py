"""The number of episodes that is found, in engines whose memory or speed has a limit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from actors.capacity.batch_size import HELD_S, WINDOW_S, BatchSize, Memory

LOOK_S = 1.0
LIFE_S = 30.0  # of an episode


@dataclass
class StandInEngine:
    """Makes tokens by its number of episodes, each of which needs a part of the memory.

    Beyond the memory episodes are evicted, and what they had is made again: a third of the speed of
    all is lost there.
    """

    speed: Callable[[int], float]
    fits: int
    now_s: float = 0.0
    tokens: float = 0.0
    evicted: int = 0
    ended: float = 0.0
    numbers: list[int] = field(default_factory=list)

    def rate(self, number: int) -> float:
        return self.speed(min(number, self.fits)) * (1.0 if number <= self.fits else 0.67)

    def run(self, size: BatchSize, seconds: float, *, is_full: bool = True) -> None:
        for _ in range(int(seconds / LOOK_S)):
            self.now_s += LOOK_S
            self.tokens += LOOK_S * self.rate(size.number)
            self.evicted += max(0, size.number - self.fits)
            self.ended += LOOK_S * size.number / LIFE_S
            memory = Memory(min(1.0, size.number / self.fits), self.evicted)
            before = size.number
            has_changed = size.look(
                self.now_s,
                tokens=int(self.tokens),
                ended=int(self.ended),
                is_full=is_full,
                memory=memory,
            )
            assert has_changed is (size.number != before)
            self.numbers.append(size.number)

    def best(self, size: BatchSize) -> float:
        return max(map(self.rate, range(size.least, size.most + 1)))


@dataclass
class Windows:
    """Gives a size one window after the other, from that of its first look at 0 s on."""

    size: BatchSize
    windows: int = 0
    tokens: int = 0
    evicted: int = 0

    def __post_init__(self) -> None:
        self._look(0.0, is_full=False, used=0.0)

    def give(
        self, tokens: int = 0, *, used: float = 0.4, evicted: int = 0, looks: int = 1, full: int = 1
    ) -> int:
        """Make so many tokens in a window, of whose looks the last are full; returns the number."""
        self.tokens += tokens
        self.evicted += evicted
        began_s = self.windows * WINDOW_S
        self.windows += 1
        for look in range(1, looks + 1):
            now_s = began_s + look * WINDOW_S / looks
            self._look(now_s, is_full=look > looks - full, used=used)
        return self.size.number

    def _look(self, now_s: float, *, is_full: bool, used: float) -> None:
        memory = Memory(used, self.evicted)
        self.size.look(now_s, tokens=self.tokens, ended=0, is_full=is_full, memory=memory)


def on_a_gpu(number: int) -> float:
    """Step time a + b x: almost twice the tokens from twice the episodes, at first."""
    return 1000 * number / (20 + 0.05 * number)


def on_a_cpu(number: int) -> float:
    """Beyond sixteen hardly more."""
    return 40.0 * min(number, 16) + 0.01 * number


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
        size = BatchSize(8, 100)
        size.number = 100
        for now_s, share in ((0.0, 0), (WINDOW_S, 1)):
            memory = Memory(1.0, 7 + share * evicted)
            size.look(now_s, tokens=0, ended=50 + share * ended, is_full=False, memory=memory)
        return size.number

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


def test_what_made_no_more_tokens_is_not_tried_again_for_a_while() -> None:
    size, engine = BatchSize(4, 1024), StandInEngine(on_a_cpu, fits=5000)
    engine.run(size, 120)
    assert size.number == 16
    assert size.reason == "32 made no more tokens"

    engine.run(size, HELD_S - 80)

    assert set(engine.numbers[120:]) == {16}
    engine.run(size, 60)
    assert 32 in engine.numbers[120:]


def test_a_step_up_goes_back_if_two_windows_made_less_than_three_hundredths_more() -> None:
    def numbers(*tokens: int) -> list[int]:
        windows = Windows(BatchSize(4, 1024))
        return [windows.give(each) for each in (1000, *tokens)]

    assert numbers(1030, 1030) == [8, 16, 16]
    assert numbers(1029, 1029) == [8, 8, 4]
    assert numbers(1029, 1031) == [8, 8, 16]


def test_a_window_counts_where_three_quarters_of_its_looks_were_full() -> None:
    for full, number in ((6, 8), (5, 4)):
        windows = Windows(BatchSize(4, 1024))

        assert windows.give(1000, looks=8, full=full) == number


def test_after_evictions_nothing_is_tried_for_a_while() -> None:
    windows = Windows(BatchSize(4, 100))
    assert [windows.give(1000 * 2**step) for step in range(5)] == [8, 16, 32, 64, 100]

    assert windows.give(evicted=3) == 80
    assert windows.size.reason == "3 episodes lost their KV cache in 10 s"
    held = [windows.give(1000) for _ in range(round(HELD_S / WINDOW_S) - 1)]
    assert set(held) == {80}
    assert windows.give(1000) == 100


def test_a_step_that_was_kept_is_not_taken_back_later() -> None:
    windows = Windows(BatchSize(4, 8))
    assert [windows.give(tokens) for tokens in (1000, 2000)] == [8, 8]

    assert [windows.give(500) for _ in range(5)] == [8] * 5


def test_a_cache_that_is_just_full_does_not_hold_the_next_step_up() -> None:
    windows = Windows(BatchSize(8, 64))

    assert [windows.give(1000, used=0.95) for _ in range(4)] == [8] * 4
    assert windows.give(1000, used=0.4) == 16
