"""A row of many turns, its actor killed, trained by one, two and four ranks; bounds scaled down."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.transport.keys import make_keys
from tests.system.support.long_rows import (
    Row,
    assert_whole,
    killed_and_continued,
    largest_difference,
    trained,
)

pytestmark = pytest.mark.slow

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1}


def test_a_long_row_is_continued_and_trained_alike_by_one_two_and_four_ranks(
    redis_url: str, tmp_path: Path
) -> None:
    row = Row(tokens=2048, turn=123, step=16)

    episodes = killed_and_continued(redis_url, make_keys(tmp_path / "keys"), row)

    assert_whole(episodes, row)
    found = trained(tmp_path / "ranks", episodes, 1, 2, 4, weights_at_once=2**18, **HEADS)
    assert found[1]["shares_prompts"], "the masks of one of a group are made in blocks"
    for size in (2, 4):
        assert found[size]["loss"] == pytest.approx(found[1]["loss"], rel=1e-4, abs=1e-6)
        assert largest_difference(tmp_path / "ranks", size) < 1e-4
