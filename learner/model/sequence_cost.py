"""Estimated cost of training a sequence, from the model's configuration.

    cost(L, N) = L token + N scored + pairs(L) pair        in multiply-adds of one forward pass

pairs(L) counts, over all layers, the tokens that each of L tokens attends to: L (L + 1) / 2 in a
layer, less where a sliding window is shorter; for L tokens that continue P others it is
pairs(P + L) - pairs(P). The backward pass costs twice as much, and what is left out (norms,
embeddings, copies) is small beside it. Ranks are balanced by it, and the model's use of a card is
taken from it (`learner/profiling.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class SequenceCost:
    """Cost of a sequence by its length; by default the length itself."""

    token: float = 1.0
    """Cost of a token in the matrices of all layers."""
    scored: float = 0.0
    """Cost of a scored token in the output layer."""
    pair: float = 0.0
    """Cost of a token that attends to another, in one layer."""
    windows: tuple[tuple[int | None, int], ...] = ()
    """Most tokens that one attends to, None = all, and the number of such layers."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read the costs from a model's configuration."""
        width, heads = config["hidden_size"], config["num_attention_heads"]
        head = config.get("head_dim") or width // heads
        shared = config.get("num_key_value_heads") or heads
        attention = width * head * (2 * heads + 2 * shared)
        layers = config["num_hidden_layers"]
        window = config.get("sliding_window")
        kinds = config.get("layer_types") or [window and "sliding_attention"] * layers
        windows = Counter(window if kind == "sliding_attention" else None for kind in kinds)
        return cls(
            token=layers * (attention + 3 * width * config["intermediate_size"]),
            scored=width * config["vocab_size"],
            pair=2 * heads * head,
            windows=tuple(windows.items()),
        )

    def __call__(self, tokens: int, scored: int, *, after: int = 0) -> float:
        """Estimate the cost of a sequence.

        Args:
            tokens: Length of the sequence.
            scored: Tokens of the sequence that are scored.
            after: Tokens of the sequence that it continues, which it sees too.
        """
        pairs = self._pairs(after + tokens) - self._pairs(after)
        return self.token * tokens + self.scored * scored + self.pair * pairs

    def _pairs(self, tokens: int) -> int:
        pairs = 0
        for window, layers in self.windows:
            seen = tokens if window is None else min(tokens, window)
            pairs += layers * (seen * (seen + 1) // 2 + (tokens - seen) * seen)
        return pairs

    def of_packed(self, lengths: Sequence[int], seen: Sequence[int], scored: int) -> float:
        """Sum the costs of the sequences of a microbatch.

        Args:
            lengths: Lengths of the sequences.
            seen: Tokens that each sequence sees: its own, and those of the one that it continues.
            scored: Scored tokens of all sequences.
        """
        costs = (
            self(length, 0, after=sees - length) for length, sees in zip(lengths, seen, strict=True)
        )
        return sum(costs) + self.scored * scored
