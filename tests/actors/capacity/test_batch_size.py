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
            size.look(
                self.now_s,
                tokens=int(self.tokens),
                ended=int(self.ended),
                is_full=is_full,
                memory=memory,
            )
            self.numbers.append(size.number)

    def best(self, size: BatchSize) -> float:
        return max(map(self.rate, range(size.least, size.most + 1)))


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


def test_nobody_is_evicted_where_the_number_has_settled() -> None:
    size, engine = BatchSize(4, 1024), StandInEngine(on_a_gpu, fits=50)
    engine.run(size, 300)
    before = engine.evicted

    engine.run(size, HELD_S - 50)

    assert engine.evicted == before
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
