"""Rows that the learner and the loop beside it train: equal ones, or groups of mixed lengths."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from benchmarks.learner.workload import GROUP_SIZE, SIGMA, make_episode
from buffer.record.episode import Episode
from tests.gpu.support.training_on_cards import QWEN3_600M

QWEN3_4B = QWEN3_600M | {
    "num_hidden_layers": 36,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
}
TINY: dict[str, Any] = QWEN3_600M | {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 512,
}


class Row(NamedTuple):
    """A prompt and its completion."""

    group: int
    prompt: np.ndarray
    ids: np.ndarray

    def __len__(self) -> int:
        return len(self.prompt) + len(self.ids)


def made_rows(kind: str, *, tokens: int, longest: int, vocabulary: int) -> list[Row]:
    """Make rows until they have so many tokens, each prompt counted once.

    Args:
        kind: `equal`: each row has all of `longest`, and no two of them share a prompt. `mixed`:
            groups of eight share theirs, of a sixteenth of `longest`; completions are log-normal.
        tokens: At least.
        longest: Most tokens of a row.
        vocabulary: Of the model.
    """
    drawn = np.random.default_rng(17)

    def random(number: int) -> np.ndarray:
        return drawn.integers(3, vocabulary, size=number, dtype=np.int32)

    rows: list[Row] = []
    total = 0
    while total < tokens:
        group, prompt = len(rows) // GROUP_SIZE, random(max(2, longest // 16))
        for _ in range(GROUP_SIZE):
            if kind == "equal":
                prompt = np.array([3 + len(rows), 4 + len(rows)], dtype=np.int32)
                length = longest - 2
            else:
                wanted = drawn.lognormal(np.log(longest / 4), SIGMA)
                length = int(np.clip(wanted, 8, longest - len(prompt)))
            rows.append(Row(group, prompt, random(length)))
            total += length + len(prompt) * (kind == "equal")
        total += len(prompt) * (kind == "mixed")
    return rows


def episodes_of(rows: list[Row], vocabulary: int) -> list[Episode]:
    """Make the episodes that end with these rows."""
    return [
        make_episode(number, row.group, row.prompt, row.ids, vocabulary)
        for number, row in enumerate(rows)
    ]
