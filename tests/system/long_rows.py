"""Rows of 32k and 128k tokens: killed, continued and trained.

Run beside CI, `pytest -s -q tests/system/long_rows.py`; prints what each took.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from broker.transport.keys import make_keys
from tests.system.support.long_rows import (
    Row,
    assert_whole,
    killed_and_continued,
    largest_difference,
    trained,
)

LONGEST_S = 5400.0
pytestmark = [pytest.mark.live, pytest.mark.timeout(2 * LONGEST_S)]

BESIDE_BYTES = 2**29
"""What no model's size changes: libraries, a block of a mask, what the allocator keeps."""
LAYERS = {"num_hidden_layers": 1, "initializer_range": 0.1, "head_dim": 16}
FOUR = LAYERS | {"num_attention_heads": 4, "num_key_value_heads": 2}
TWO = LAYERS | {"num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.mark.parametrize(
    ("row", "ranks", "shape"),
    [
        (Row(tokens=32_768, turn=1019, step=128), (1, 2, 4), FOUR),
        (Row(tokens=131_072, turn=1019, step=256, shares_prompt=False), (1,), TWO),
    ],
    ids=["32k", "128k"],
)
def test_a_long_row_is_continued_and_trained(
    redis_url: str, tmp_path: Path, row: Row, ranks: tuple[int, ...], shape: dict[str, Any]
) -> None:
    began = time.monotonic()
    episodes = killed_and_continued(redis_url, make_keys(tmp_path / "keys"), row, patience_s=600.0)
    sampled_s = round(time.monotonic() - began, 1)

    assert_whole(episodes, row)
    found = trained(tmp_path / "ranks", episodes, *ranks, within_s=LONGEST_S, **shape)
    for size in ranks:
        figures = {"tokens": row.tokens, "ranks": size, "sampled_s": sampled_s} | found[size]
        if size > 1:
            figures["difference"] = largest_difference(tmp_path / "ranks", size)
            assert figures["difference"] < 1e-3
            assert found[size]["loss"] == pytest.approx(found[1]["loss"], rel=1e-4, abs=1e-6)
        print(json.dumps(figures))
        assert found[size]["peak_bytes"] < found[size]["computed"] + BESIDE_BYTES
