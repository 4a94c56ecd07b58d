"""Dealing: every sequence once, within the budget, and like costs side by side."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.support.lockstep import least_lockstep, lockstep
from learner.data.dealing import Place, deal
from learner.model.sequence_cost import SequenceCost

FOUR_BILLION = {
    "hidden_size": 2560,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 36,
    "intermediate_size": 9728,
    "vocab_size": 151936,
}
COST = SequenceCost.of(FOUR_BILLION)


def _made(number: int, seed: int) -> tuple[list[int], list[float]]:
    """Answers of mean 4,000 and at most 32,768 tokens, and what they cost."""
    random = np.random.default_rng(seed)
    answers = random.lognormal(math.log(4000) - 0.5, 1.0, number).clip(1, 32768).astype(int)
    tokens = answers + random.integers(64, 193, number)
    return tokens.tolist(), [COST(*size) for size in zip(tokens.tolist(), answers, strict=True)]


@pytest.mark.parametrize("microbatch_tokens", [16384, 65536])
@pytest.mark.parametrize(("ranks", "number"), [(8, 512), (64, 1024)])
def test_ranks_wait_for_one_another_hardly_longer_than_the_longest_episodes_need(
    ranks: int, number: int, microbatch_tokens: int
) -> None:
    budget = {"ranks": ranks, "microbatch_tokens": microbatch_tokens}
    for seed in range(3):
        tokens, costs = _made(number, seed)

        places = deal(tokens, costs, **budget)

        least = least_lockstep(tokens, costs, **budget, cost=COST)
        assert least <= lockstep(places, costs) <= 1.05 * least


@pytest.mark.parametrize(("ranks", "microbatch_tokens"), [(1, 100), (3, 100), (3, 1000), (8, 16)])
def test_each_sequence_has_one_place_within_the_budget(ranks: int, microbatch_tokens: int) -> None:
    random = np.random.default_rng(0)
    tokens = random.integers(1, 40, size=200).tolist()

    places = deal(tokens, tokens, ranks=ranks, microbatch_tokens=microbatch_tokens)

    sums: dict[Place, list[int]] = {}
    for place, length in zip(places, tokens, strict=True):
        sums.setdefault(place, []).append(length)
    assert len(places) == 200
    assert all(sum(m) <= microbatch_tokens or len(m) == 1 for m in sums.values())
    assert {place.rank for place in places} == set(range(ranks))
    num_microbatches = 1 + max(place.microbatch for place in places)
    if microbatch_tokens >= 100:
        fewest = math.ceil(sum(tokens) / ranks / microbatch_tokens)
        assert num_microbatches <= math.ceil(1.1 * fewest)


def test_one_longer_than_the_budget_stands_alone() -> None:
    places = deal([5, 500, 4], [5, 500, 4], ranks=1, microbatch_tokens=100)

    assert [place.microbatch for place in places] == [1, 0, 1]


def test_a_sequence_costs_what_its_layers_and_its_windows_compute() -> None:
    config = {
        "hidden_size": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": 2,
        "intermediate_size": 8,
        "vocab_size": 10,
    }
    matrices = 2 * (4 * 4 * 2 + 4 * 2 * 2 + 3 * 4 * 8)  # queries and outputs, keys and values, MLP

    assert SequenceCost.of(config)(5, 2) == 5 * matrices + 2 * 40 + 2 * 15 * 8
    windowed = config | {"sliding_window": 2}
    assert SequenceCost.of(windowed)(5, 2) == 5 * matrices + 2 * 40 + 2 * 9 * 8
    mixed = windowed | {"layer_types": ["full_attention", "sliding_attention"]}
    assert SequenceCost.of(mixed)(5, 2) == 5 * matrices + 2 * 40 + (15 + 9) * 8
    assert SequenceCost()(5, 2) == 5
