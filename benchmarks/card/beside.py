"""The loop that one would write first: transformers, with liger-kernel's kernels where it is there.

Parameters in bfloat16 with float32 masters, cross entropy, SDPA, layers recomputed or not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3 import modeling_qwen3

from benchmarks.card.rows import Row

HAS_LIGER = find_spec("liger_kernel") is not None
IGNORED = -100

Batch = dict[str, Tensor]


@contextmanager
def ligers_kernels(model: nn.Module) -> Iterator[None]:
    """Exchange the layers of a model; the classes and functions of transformers are given back."""
    if not HAS_LIGER or not torch.cuda.is_available():
        yield
        return
    from liger_kernel.transformers import (  # type: ignore[import-not-found, unused-ignore]
        apply_liger_kernel_to_qwen3,
    )

    names = dict(vars(modeling_qwen3))
    kinds = [kind for kind in names.values() if isinstance(kind, type) and "forward" in vars(kind)]
    forwards = {kind: vars(kind)["forward"] for kind in kinds}
    try:
        apply_liger_kernel_to_qwen3(
            rope=True, rms_norm=True, swiglu=True, fused_linear_cross_entropy=True, model=model
        )
        yield
    finally:
        vars(modeling_qwen3).update(names)
        for kind, forward in forwards.items():
            kind.forward = forward  # type: ignore[attr-defined]


class LoopBeside:
    """A model, its optimizer and a step over batches."""

    def __init__(self, shape: Mapping[str, Any], *, device: str, kept: str) -> None:
        torch.manual_seed(0)
        with torch.device(device):
            self.model = Qwen3ForCausalLM(Qwen3Config(**shape, attn_implementation="sdpa"))
        self.model.to(torch.bfloat16).train()
        self.model.config.use_cache = False
        if kept == "full":
            how = {"use_reentrant": False}
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
        self._device = device
        self._masters = [(p, p.detach().float().requires_grad_()) for p in self.model.parameters()]
        # One each: wide gradients are there for one parameter at a time.
        self._optimizers = [
            torch.optim.AdamW([wide], lr=1e-6, fused=True) for _, wide in self._masters
        ]

    def train(self, batches: list[Batch]) -> float:
        """Take one step over all batches."""
        loss = torch.zeros((), device=self._device)
        for batch in batches:
            part = self.model(**batch, use_cache=False).loss / len(batches)
            part.backward()
            loss += part.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        with torch.no_grad():
            for (narrow, wide), optimizer in zip(self._masters, self._optimizers, strict=True):
                assert narrow.grad is not None
                wide.grad, narrow.grad = narrow.grad.float(), None
                optimizer.step()
                wide.grad = None
                narrow.copy_(wide)
        return float(loss)

    def cut(self, rows: list[Row], budget: int, *, packed: bool) -> list[Batch]:
        """Cut rows into batches of at most so many tokens, those of like lengths together."""
        tokens = [torch.from_numpy(np.concatenate([row.prompt, row.ids])).long() for row in rows]
        cuts: list[list[Tensor]] = [[]]
        for ids in sorted(tokens, key=len):
            held = sum(map(len, cuts[-1])) if packed else len(cuts[-1]) * len(ids)
            if cuts[-1] and held + len(ids) > budget:
                cuts.append([])
            cuts[-1].append(ids)
        make = self._packed if packed else self._padded
        return [{k: v.to(self._device) for k, v in make(cut).items()} for cut in cuts]

    def _padded(self, rows: list[Tensor]) -> Batch:
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        if len({*map(len, rows)}) == 1:
            return {"input_ids": ids, "labels": ids}
        mask = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        labels = ids.masked_fill(mask == 0, IGNORED)
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    def _packed(self, rows: list[Tensor]) -> Batch:
        first = torch.tensor([IGNORED])
        return {
            "input_ids": torch.cat(rows)[None],
            "position_ids": torch.cat([torch.arange(len(row)) for row in rows])[None],
            "labels": torch.cat([part for row in rows for part in (first, row[1:])])[None],
        }
