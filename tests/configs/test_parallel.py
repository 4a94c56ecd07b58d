"""Sizes of `parallel`: what fits, and ten that do not."""

from __future__ import annotations

from typing import Any

import pytest

from configs.errors import SettingsError
from configs.settings import ParallelSettings
from configs.validation.learner import Layout, check_heads, layout_of


@pytest.mark.parametrize(
    ("sizes", "ranks", "layout"),
    [
        ({}, 1, (1, 1, 1)),
        ({}, 8, (1, 8, 1)),
        ({"replicate": 2}, 8, (2, 4, 1)),
        ({"shard": 8, "sequence": 4}, 8, (1, 8, 4)),
        ({"replicate": 4, "shard": 2, "sequence": 8}, 8, (4, 2, 8)),
        ({"tensor": 4}, 8, (1, 2, 1, 4)),
        ({"tensor": 2, "replicate": 2, "sequence": 4}, 16, (2, 4, 4, 2)),
    ],
)
def test_ranks_are_divided(sizes: dict[str, int], ranks: int, layout: tuple[int, ...]) -> None:
    assert layout_of(ParallelSettings(**sizes), ranks) == Layout(*layout)


@pytest.mark.parametrize(
    ("heads", "of_keys", "sequence"), [(32, 8, 8), (32, 8, 16), (14, 2, 2), (8, None, 8), (6, 3, 3)]
)
def test_heads_are_divided(heads: int, of_keys: int | None, sequence: int) -> None:
    config: dict[str, Any] = {"num_attention_heads": heads, "num_key_value_heads": of_keys}

    check_heads(ParallelSettings(sequence=sequence), config)


@pytest.mark.parametrize(
    ("sizes", "ranks", "heads", "sentence"),
    [
        (
            {"replicate": 3},
            4,
            None,
            r"parallel\.replicate must divide .* = 4, got 3; choose a divisor",
        ),
        ({"replicate": 2}, 1, None, r"parallel\.replicate must divide .* = 1, got 2"),
        ({"shard": 4}, 8, None, r"replicate x parallel\.shard must be .* = 8, got 1 x 4; .* for 8"),
        ({"replicate": 2, "shard": 2}, 8, None, r"must be .* = 8, got 2 x 2; .* for 4"),
        ({"shard": 16}, 8, None, r"must be the number of ranks = 8, got 1 x 16"),
        (
            {"sequence": 2},
            1,
            None,
            r"parallel\.sequence must divide .* = 1, got 2; choose a divisor",
        ),
        ({"sequence": 4}, 6, None, r"parallel\.sequence must divide .* = 6, got 4"),
        ({"sequence": 4}, 4, (14, 2), r"must divide the 14 attention heads of the model, got 4"),
        ({"sequence": 16}, 16, (8, 8), r"must divide the 8 attention heads of the model, got 16"),
        ({"sequence": 6}, 6, (12, 4), r"the 4 heads of keys and values .* or be a multiple"),
        ({"tensor": 3}, 4, None, r"parallel\.tensor must divide .* = 4, got 3; choose a divisor"),
        (
            {"tensor": 2, "shard": 4},
            4,
            None,
            r"tensor = 2, which leaves 2 of 4 .* got 1 x 4; .* for 2",
        ),
        ({"tensor": 4}, 4, (14, 2), r"tensor must divide the 14 attention heads of the model, got"),
        ({"tensor": 4}, 4, (8, 2), r"tensor must divide the 2 heads of keys and values .*, got 4"),
        ({"tensor": 3}, 3, (6, 3), r"tensor must divide the 64 columns of the inner layer .* 3;"),
        ({"tensor": 2, "sequence": 4}, 8, (12, 4), r"the 6 attention heads that .* = 2 leaves to"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(
    sizes: dict[str, int], ranks: int, heads: tuple[int, int] | None, sentence: str
) -> None:
    names = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    config = dict(zip(names, (*heads, 64) if heads else (), strict=False))

    with pytest.raises(SettingsError, match=sentence):
        _check(ParallelSettings(**sizes), ranks, config)


def _check(parallel: ParallelSettings, ranks: int, config: dict[str, Any]) -> None:
    layout_of(parallel, ranks)
    check_heads(parallel, config)
