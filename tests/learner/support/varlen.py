"""What torch's kernel for sequences of different lengths promises, which no CPU runs."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def varlen_by_its_documentation(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    begins: Tensor,
    key_begins: Tensor,
    *longest: int,
    **how: Any,
) -> Tensor:
    """Attend within each sequence; the last query of one stands at its last key. [T, H, K]."""
    assert begins.dtype == key_begins.dtype == torch.int32
    assert longest == (int(begins.diff().max()), int(key_begins.diff().max()))
    left, right = how["window_size"]
    shared = query.shape[1] // key.shape[1]
    assert how["enable_gqa"] == (shared > 1)
    outputs = []
    for bounds, key_bounds in zip(
        pairwise(begins.tolist()), pairwise(key_begins.tolist()), strict=True
    ):
        q = query[slice(*bounds)].transpose(0, 1)
        k, v = (x[slice(*key_bounds)].transpose(0, 1) for x in (key, value))
        k, v = (x.repeat_interleave(shared, dim=0) for x in (k, v))
        first = k.shape[1] - q.shape[1]
        back = torch.arange(first, k.shape[1])[:, None] - torch.arange(k.shape[1])
        seen = (back >= -right) & ((back <= left) | (left < 0))
        logits = (q @ k.transpose(1, 2) * how["scale"]).masked_fill(~seen, -torch.inf)
        outputs.append((logits.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outputs)
