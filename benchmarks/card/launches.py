"""Launches of one step of the learner, counted on a CPU: `python -m benchmarks.card.launches`.

A Qwen3 of 36 narrow layers trains two microbatches of eight equal rows with bfloat16 passes and
full recomputation, and logits in 16 chunks, as Qwen3-4B does in `benchmarks.card`. Two ways:

    plain    FSDP2, the layers of transformers, and logits by torch's operators
    ours     one rank without FSDP2, layers and logits by kernels of Triton, as on a card

An operator that neither gives a view nor leaves its result unwritten counts once. Kernels count
too, but do not run: it needs Triton, and no card. On a card operators over many tensors take
several launches, attention some of its own, and products now and then another one.
"""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.card.rows import TINY, episodes_of, made_rows
from benchmarks.learner.arm import OurLoop
from learner.model.memory_rules import CHUNK_SIZES, ChunkSize
from tests.learner.support.fresh_kernels import LOGITS
from tests.learner.support.interpreted_kernels import (
    Launches,
    counted_launches,
    interpreted_kernels,
    interpreted_logits,
)
from tests.learner.support.ranks.forced_shards import forced_shards

WAYS = ("plain", "ours")
LAYERS, ROWS, MICROBATCHES = 36, 8, 2
CHUNK, CHUNKS = 16, 16
"""Tokens of a chunk of logits, as many as it has blocks; a card takes 1,024. Of a microbatch."""
SHAPE: dict[str, Any] = TINY | {"hidden_size": 32, "head_dim": 16, "vocab_size": 64}
NAMES, PLACES = 16, 24
"""Lines of the tables."""
GROUPS = {
    "products": {"mm", "addmm", "addmm_"},
    "copies and casts": {"_to_copy", "copy_", "_foreach_copy_", "clone", "cat", "chunk_cat"},
    "zeros and copies of slices": {"select_backward", "slice_backward"},
    "attention": {
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
    },
}


def launches_of(way: str, *, layers: int = LAYERS, chunks: int = CHUNKS) -> Launches:
    """Count the launches of a step, the second one: the first begins the moments."""
    with ExitStack() as stack:
        modules = []
        if way == "ours":
            modules = [stack.enter_context(interpreted_kernels()), sys.modules[LOGITS]]
            stack.enter_context(interpreted_logits())
        else:
            stack.enter_context(forced_shards())
        chunk = ChunkSize(logits=0, tokens=CHUNK)
        stack.enter_context(mock.patch.dict(CHUNK_SIZES, cpu=chunk))
        torch.manual_seed(0)
        shape: dict[str, Any] = SHAPE | {"num_hidden_layers": layers}
        model = Qwen3ForCausalLM(Qwen3Config(**shape))
        longest = chunks * CHUNK // ROWS + 2  # the prompt
        budget = ROWS * longest + longest // 2
        loop = OurLoop(budget, model, activations="full", dtype=torch.bfloat16, longest=longest)
        tokens = MICROBATCHES * ROWS * longest
        rows = made_rows("equal", tokens=tokens, longest=longest, vocabulary=SHAPE["vocab_size"])
        microbatches = loop.pack(episodes_of(rows, SHAPE["vocab_size"]))
        assert len(microbatches) == MICROBATCHES
        with counted_launches(*modules):
            loop.train(microbatches)
        with counted_launches(*modules) as found:
            loop.train(microbatches)
    return found


def group_of(name: str) -> str:
    """Name the group of an operator or a kernel."""
    return next((group for group, names in GROUPS.items() if name in names), "others")


def main() -> None:
    """Print the launches of both ways, and where ours come from."""
    plain, ours = (launches_of(way) for way in WAYS)
    print("| launches of a step | plain | ours |\n| --- | --- | --- |")
    counts = [plain.counts, ours.counts]
    groups: list[Counter[str]] = []
    for found in counts:
        groups.append(Counter())
        for name, number in found.items():
            groups[-1][group_of(name)] += number
    for name in sorted(groups[0] | groups[1]):
        print(f"| {name} | {groups[0][name]:,} | {groups[1][name]:,} |")
    print(f"| all | {counts[0].total():,} | {counts[1].total():,} |\n")
    for name, _ in (counts[0] | counts[1]).most_common(NAMES):
        print(f"| `{name}` | {counts[0][name]:,} | {counts[1][name]:,} |")
    print("\n| ours | launches | where |\n| --- | --- | --- |")
    for (name, place), number in ours.places.most_common(PLACES):
        print(f"| `{name}` | {number:,} | {place} |")


if __name__ == "__main__":
    main()
