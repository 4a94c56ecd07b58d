"""KV cache of the torch engine: rows of one static tensor per layer, the first ones in use.

A row that ends is overwritten by the last one, so that decoding reads a plain slice and copies
nothing. transformers' layers call `update`; prefill or decode is chosen before each forward pass.

Shapes: R rows in use, N rows in all, H key-value heads, S slots of a row, T new tokens, K head
width.
"""

from __future__ import annotations

import torch
from torch import Tensor


class RowCache:
    """Keys and values [N, H, S, K] of every layer, and how many slots of each row are filled."""

    def __init__(self, *, num_rows: int, num_slots: int, device: torch.device) -> None:
        self._num_rows = num_rows
        self._num_slots = num_slots
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._lengths_N = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._rows = slice(0, 0)
        self._is_prefill = True
        self._longest = 0

    def begin_prefill(self, rows: slice, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Prepare empty rows for T tokens each; return positions [1, T] and mask [1, 1, T, T]."""
        self._rows, self._is_prefill = rows, True
        self._lengths_N[rows] = num_tokens
        positions_1T = torch.arange(num_tokens, device=self._lengths_N.device)[None]
        return positions_1T, (positions_1T.mT >= positions_1T)[None, None]

    def begin_decode(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """Prepare the first rows for a token each; return positions [R, 1], mask [R, 1, 1, S']."""
        self._rows, self._is_prefill = slice(0, num_rows), False
        positions_R1 = self._lengths_N[:num_rows, None].clone()
        self._lengths_N[:num_rows] += 1
        self._longest = int(positions_R1.max()) + 1
        slots = torch.arange(self._longest, device=positions_R1.device)
        return positions_R1, (slots <= positions_R1)[:, None, None]

    def move(self, source: int, target: int) -> None:
        """Overwrite row `target` by row `source`."""
        length = int(self._lengths_N[source])
        self._lengths_N[target] = length
        for keys, values in self._layers.values():
            keys[target, :, :length] = keys[source, :, :length]
            values[target, :, :length] = values[source, :, :length]

    def update(
        self, new_keys: Tensor, new_values: Tensor, layer_idx: int, *_: object
    ) -> tuple[Tensor, Tensor]:
        """Store what a layer computed [R, H, T, K]; return all that its queries may look at."""
        keys, values = self._layer(layer_idx, new_keys)
        rows = self._rows
        if self._is_prefill:
            keys[rows, :, : new_keys.shape[2]] = new_keys
            values[rows, :, : new_values.shape[2]] = new_values
            return new_keys, new_values
        row_R = torch.arange(rows.stop, device=keys.device)
        slot_R = self._lengths_N[rows] - 1
        keys[row_R, :, slot_R] = new_keys[:, :, 0]
        values[row_R, :, slot_R] = new_values[:, :, 0]
        return keys[rows, :, : self._longest], values[rows, :, : self._longest]

    def _layer(self, layer_idx: int, like: Tensor) -> tuple[Tensor, Tensor]:
        if layer_idx not in self._layers:
            shape = (self._num_rows, like.shape[1], self._num_slots, like.shape[3])
            # Zeros: a masked slot still takes part in a product, and memory as found may hold NaN.
            self._layers[layer_idx] = (like.new_zeros(shape), like.new_zeros(shape))
        return self._layers[layer_idx]
