"""The learner's step beside transformers with liger-kernel: the same rows, in turns.

Models of Qwen3's shapes with random weights; ours has entropies and the policy loss beside the
cross entropy of the other. A model at a time is on the card.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.card.beside import HAS_LIGER, LoopBeside, ligers_kernels
from benchmarks.card.kernels import profile_of
from benchmarks.card.machine import now
from benchmarks.card.rows import QWEN3_4B, TINY, Row, episodes_of, made_rows
from benchmarks.card.stage import Asked, Figures, Note, main
from benchmarks.learner.arm import OurLoop
from learner.model.activations import Kept
from learner.model.sequence_cost import SequenceCost
from learner.profiling import PER_MULTIPLY_ADD, stated_peak
from tests.gpu.support.training_on_cards import QWEN3_600M

ROWS = 16
BESIDE = "liger" if HAS_LIGER else "transformers"
ROUNDS = 2
STEPS = 2


class Case(NamedTuple):
    """What both sides train."""

    name: str
    rows: str
    budget: int
    """Tokens of a microbatch."""
    kept: Kept
    shape: Mapping[str, Any]
    rounds: int = 1


class Work(NamedTuple):
    """A case, and how it is trained once."""

    case: Case
    rows: list[Row]
    device: str
    is_profiled: bool

    def size(self) -> tuple[int, float]:
        """Count tokens, and multiply-adds of a forward pass; shared prompts count once."""
        cost = SequenceCost.from_config(self.case.shape)
        if self.case.rows == "equal":
            adds = sum(cost(len(row), len(row.ids)) for row in self.rows)
            return sum(map(len, self.rows)), adds
        prompts = {row.group: len(row.prompt) for row in self.rows}
        adds = sum(cost(length, 0) for length in prompts.values())
        adds += sum(cost(len(row.ids), len(row.ids), after=len(row.prompt)) for row in self.rows)
        return sum(prompts.values()) + sum(len(row.ids) for row in self.rows), adds


def cases_of(asked: Asked) -> tuple[list[Case], int]:
    """Return the cases, and the most tokens of a row."""
    large, small = (TINY, TINY) if asked.is_tiny else (QWEN3_4B, QWEN3_600M)
    longest = 32 if asked.is_tiny else 2048
    half, rounds = ROWS * longest // 2, 1 if asked.is_tiny else ROUNDS
    return [
        Case("4b_16k", "equal", half, "full", large, rounds),
        Case("4b_32k", "equal", 2 * half, "full", large, rounds),
        Case("4b_mixed", "mixed", half, "full", large),
        Case("0.6b", "equal", half, "none", small),
    ], longest


def measure(asked: Asked, note: Note) -> None:
    """Train every case by both sides; the kernels of the first one are listed too."""
    cases, longest = cases_of(asked)
    for case in cases:
        vocabulary = case.shape["vocab_size"]
        rows = made_rows(case.rows, tokens=ROWS * longest, longest=longest, vocabulary=vocabulary)
        padded, packed = (partial(beside, is_packed=packed) for packed in (False, True))
        other = f"{BESIDE}_{case.name}"
        is_mixed = case.rows == "mixed"
        sides = {f"ours_{case.name}": partial(ours, longest=longest)}
        sides |= (
            {f"{other}_padded": padded, f"{other}_packed": packed} if is_mixed else {other: padded}
        )
        turns: dict[str, list[Figures]] = {name: [] for name in sides}
        for turn in range(case.rounds):
            for name, side in sides.items():
                is_profiled = case is cases[0] and turn == 0
                turns[name].append(side(Work(case, rows, asked.device, is_profiled)))
                _free()
        for name, found in turns.items():
            best = max(found, key=lambda figures: figures["tokens_per_s"])
            note(name, found[0] | best | {"each": [each["tokens_per_s"] for each in found]})


def ours(work: Work, *, longest: int) -> Figures:
    """Train by this project's step."""
    case = work.case
    torch.manual_seed(0)
    with torch.device(work.device):
        model = Qwen3ForCausalLM(Qwen3Config(**case.shape))
    # A batch of several microbatches fills .97 of each, but equal rows are wanted whole.
    budget = case.budget + (longest // 2 if case.rows == "equal" else 0)
    loop = OurLoop(
        budget,
        model,
        activations=case.kept,
        device=work.device,
        dtype=torch.bfloat16,
        longest=longest,
    )
    microbatches = loop.pack(episodes_of(work.rows, case.shape["vocab_size"]))
    return timed(lambda: loop.train(microbatches), work)


def beside(work: Work, *, is_packed: bool) -> Figures:
    """Train by the loop beside it."""
    loop = LoopBeside(work.case.shape, device=work.device, kept=work.case.kept)
    with ligers_kernels(loop.model):
        batches = loop.cut(work.rows, work.case.budget, packed=is_packed)
        return timed(lambda: loop.train(batches), work)


def timed(train: Callable[[], object], work: Work) -> Figures:
    """Take a first step, and the best of a few; tokens of a shared prompt count once."""
    device = work.device
    began = now(device)
    train()
    first_s = now(device) - began
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    took = []
    for _ in range(STEPS):
        began = now(device)
        train()
        took.append(now(device) - began)
    tokens, adds = work.size()
    tflops = PER_MULTIPLY_ADD * adds / min(took) / 1e12
    peak = stated_peak(torch.device(device), "bfloat16")
    figures: Figures = {
        "tokens_per_s": round(tokens / min(took)),
        "step_s": round(min(took), 4),
        "first_step_s": round(first_s, 2),
        "tflops": round(tflops, 1),
        "mfu": peak and round(tflops / peak, 4),
    }
    if device == "cuda":
        figures["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    if work.is_profiled:
        figures["kernels"] = profile_of(train, device)
    return figures


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main(measure)
