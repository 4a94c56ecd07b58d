"""Random histories against a real Redis, and mutants that they must catch.

Other seeds: NYALA_SEED=1000 NYALA_SEEDS=500 pytest tests/buffer/test_history.py; one seed without
pytest: python -m tests.buffer.support.history --seed 1000.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from buffer.client.scripts import LoadScript, load_script
from tests.buffer.support.history import History
from tests.buffer.support.mutants import MUTANTS, Mutant, broken

FIRST_SEED = int(os.environ.get("NYALA_SEED", "0"))
SEEDS = int(os.environ.get("NYALA_SEEDS", "1" if "NYALA_SEED" in os.environ else "16"))
SEEDS_PER_MUTANT = 120  # three times what the rarest of them needed, with and without agents


@contextmanager
def _history(url: str, seed: int, scripts: LoadScript = load_script) -> Iterator[History]:
    history = History(url, seed, scripts)
    try:
        yield history
    finally:
        history.close()


@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + SEEDS))
def test_no_history_loses_repeats_or_mixes_episodes(redis_url: str, seed: int) -> None:
    with _history(redis_url, seed) as history:
        history.play()

        assert history.world.learner.step > 3


def test_an_actor_that_answers_before_it_stores_is_caught(redis_url: str) -> None:
    with _history(redis_url, 0) as history:
        history.world.answers_early = True

        with pytest.raises(AssertionError, match=r"^C1: "):
            history.play()


@pytest.mark.slow
def test_a_seed_repeats_its_history(redis_url: str) -> None:
    traces = []
    for _ in range(2):
        with _history(redis_url, 5) as history:
            history.play()
            traces.append(history.trace)

    assert traces[0] == traces[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_protocol_is_caught(redis_url: str, name: str) -> None:
    mutant = MUTANTS[name]
    scripts = broken(mutant)

    def hunt() -> None:
        for seed in range(SEEDS_PER_MUTANT):
            with _history(redis_url, seed, scripts) as history:
                history.play()

    with pytest.raises(AssertionError, match=f"^({mutant.invariant}): "):
        hunt()


def test_a_mutant_of_a_text_that_is_gone_is_an_error() -> None:
    with pytest.raises(AssertionError, match="got 0 times"):
        broken(Mutant("reap", "no such text", "", "I1"))
    with pytest.raises(AssertionError, match=r"beat.lua must have once 'local', got \d+ times"):
        broken(Mutant("beat", "local", "", "I1"))
