"""One rank of two or four: loss and gradients of every layout beside those of one rank, in float64.

For `test_parallel.py`. Each rank computes the whole batch alone too, and compares. Argument: folder
for the findings, and for checkpoints that change from one layout to another.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from buffer.record.episode import Branch, Episode
from configs.settings import AlgorithmSettings, LearnerSettings, ParallelSettings
from configs.validation.learner import layout_of
from learner.algorithm.microbatch import Microbatch, PreparedMicrobatch, empty_microbatch
from learner.checkpointing.checkpoint import Checkpoints
from learner.checkpointing.learner_state import LearnerState
from learner.data.batch import pack, plan_batch
from learner.model.policy import Policy, shard
from learner.model.ranks import Ranks, arrange, join
from learner.reporting.metrics import Totals
from learner.training.divergence import DivergenceMeter
from learner.training.optimizer import ScheduledOptimizer
from learner.training.step import accumulate
from tests.learner.support.made_episodes import random_group_episodes
from tests.learner.support.padded import StayWide
from tests.learner.support.random_models import make_random_model
from tests.learner.support.ranks.wrong_exchanges import WRONG
from tests.learner.support.tiny_policy import constant_rate

SETTINGS = AlgorithmSettings(entropy_bonus=0.01)
STATE = LearnerState("tiny", "h", 2, lineage=1, cursor=0, trained=(), totals=Totals())
TIMEOUT = timedelta(seconds=100)
WIDE = torch.float64


class Case(NamedTuple):
    """A model in a layout of ranks."""

    family: str
    parallel: dict[str, int]
    shape: dict[str, Any]
    activations: Any = "none"
    is_wide: bool = True
    """In float64 throughout."""
    surrogate: str = "clip"
    """`gmpo` is a loss over sequences, whose gradient comes back through the scores."""


FOUR_AND_TWO = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1}
FOUR_AND_ONE = FOUR_AND_TWO | {"num_key_value_heads": 1}
GRANITE = FOUR_AND_TWO | {"attention_multiplier": 0.1}
BOTH = {"replicate": 2, "sequence": 2}
PARTS = {"tensor": 2}
UNEVEN = FOUR_AND_TWO | {"vocab_size": 49, "hidden_size": 66, "intermediate_size": 62}
UNTIED = UNEVEN | {
    "hidden_size": 68,
    "tie_word_embeddings": False,
    "attention_bias": True,
}
CASES: dict[int, dict[str, Case]] = {
    2: {
        "copies": Case("llama", {"replicate": 2}, FOUR_AND_TWO),
        "sequence": Case("qwen3", {"sequence": 2}, FOUR_AND_TWO),
        "sequence, scores in two passes": Case(
            "qwen3", {"sequence": 2}, FOUR_AND_TWO, surrogate="gmpo"
        ),
        "sequence of copies": Case("llama", BOTH, FOUR_AND_TWO),
        "one head of keys and values": Case("gemma3_text", {"sequence": 2}, FOUR_AND_ONE),
        "caps": Case("gemma2", {"sequence": 2}, FOUR_AND_TWO),
        "a scale of its own": Case("granite", {"sequence": 2}, GRANITE),
        "computed again": Case("qwen3", {"sequence": 2}, FOUR_AND_TWO, "full", False),
        "computed again in part": Case("qwen3", BOTH, FOUR_AND_TWO, "selective", False),
        "tensor": Case("qwen3", PARTS, UNEVEN),
        "tensor, scores in two passes": Case("gemma2", PARTS, FOUR_AND_TWO, surrogate="gmpo"),
        "tensor, untied, with biases": Case("llama", PARTS, UNTIED),
        "tensor, windows and heads' norms": Case("gemma3_text", PARTS, FOUR_AND_TWO),
        "tensor, a scale of its own": Case("granite", PARTS, GRANITE),
        "tensor, computed again": Case("qwen3", PARTS, FOUR_AND_TWO, "full", False),
        "tensor, computed again in part": Case("llama", PARTS, UNTIED, "selective", False),
    },
    4: {
        "hsdp": Case("qwen3", {"replicate": 2}, FOUR_AND_TWO),
        "shard x sequence": Case("qwen3", {"sequence": 2}, FOUR_AND_TWO),
        "hsdp x sequence": Case("qwen3", BOTH, FOUR_AND_TWO),
        "tensor x shard": Case("qwen3", PARTS, UNEVEN),
        "tensor x shard, untied": Case("llama", PARTS, UNTIED),
        "tensor x copies": Case("gemma3_text", PARTS | {"replicate": 2}, FOUR_AND_TWO),
        "tensor x sequence": Case("qwen3", PARTS | {"sequence": 2}, FOUR_AND_TWO),
        "keys and values on two ranks each": Case("qwen3", {"sequence": 4}, FOUR_AND_TWO),
    },
}


def arranged(ranks: Ranks, parallel: dict[str, int]) -> Ranks:
    """The same ranks in another layout."""
    layout = layout_of(ParallelSettings(**parallel), ranks.size)
    mesh, sequence, tensor = arrange(layout, "cpu", rank=ranks.rank, timeout=TIMEOUT)
    return replace(ranks, mesh=mesh, sequence=sequence, tensor=tensor)


def _branched(episode: Episode) -> Episode:
    """Let the tokens from the third on follow the first, and those from the fifth on the prompt."""
    completion = episode.completion
    branches = [Branch(2, 1), Branch(4, 0)]
    begun = tuple(branch for branch in branches if branch.start < len(completion.token_ids))
    return replace(episode, completion=replace(completion, branches=begun))


def _microbatches(ranks: int, rank: int) -> list[Microbatch]:
    episodes = [_branched(episode) for episode in random_group_episodes(4, 3, seed=1)]
    plan = plan_batch(
        1,
        episodes,
        ranks=ranks,
        settings=SETTINGS,
        max_completion_tokens=8,
        microbatch_tokens=1000,
    )
    own = {*plan.task_ids_of(rank)}
    packed = pack(
        plan,
        [episode for episode in episodes if episode.task_id in own],
        settings=SETTINGS,
        lineages={1: 0},
        lineage=1,
    )
    assert ranks > 2 or packed[0].sequences.seen is not None, "a prompt is there once"
    return [*packed, empty_microbatch()]  # of which some ranks have not one token


def new_policy(case: Case) -> Policy:
    """Make a policy, whole."""
    policy = Policy(make_random_model(case.family, **case.shape).to(WIDE), temperature=1.0)
    return policy.eval()


def _passes(policy: Policy, microbatches: Sequence[Microbatch], surrogate: str) -> Tensor:
    """Add up the gradients of a batch; this rank's share of its loss."""
    settings = AlgorithmSettings.model_validate(
        {"surrogate": surrogate, "entropy_bonus": SETTINGS.entropy_bonus}
    )
    meter = DivergenceMeter(settings, torch.device("cpu"))
    losses = [accumulate(policy, PreparedMicrobatch(m), meter, settings) for m in microbatches]
    return torch.stack(losses).double().sum()


def whole(tensor: Tensor | None) -> Tensor:
    """Gather a tensor; every rank must call it."""
    assert tensor is not None
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


@cache
def _alone(family: str, surrogate: str, *shape: tuple[str, Any]) -> tuple[Tensor, list[Tensor]]:
    policy = new_policy(Case(family, {}, dict(shape)))
    with StayWide():
        loss = _passes(policy, _microbatches(1, 0), surrogate)
    return loss, [whole(parameter.grad) for parameter in policy.parameters()]


def _in_layout(case: Case, ranks: Ranks) -> tuple[Tensor, list[Tensor]]:
    there = arranged(ranks, case.parallel)
    policy = new_policy(case)
    policy.sequence_group = there.sequence
    policy = shard(
        policy, there.mesh, dtype=WIDE, activations=case.activations, tensor=there.tensor
    )
    # What is computed again, autograd computes outside of any such mode.
    with StayWide() if case.is_wide else nullcontext():
        own = _passes(policy, _microbatches(there.data_size, there.data_rank), case.surrogate)
    return there.sum(own), [whole(parameter.grad) for parameter in policy.parameters()]


def error_of(
    case: Case, ranks: Ranks, wrong: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> float:
    """Largest relative error of loss and gradients in a layout, on rank 0.

    Against one rank; what is computed again, against the same layout in which nothing is.
    """
    with wrong():
        found = _in_layout(case, ranks)
    if not case.is_wide:
        expected = _in_layout(case._replace(activations="none"), ranks)
    elif ranks.is_first:
        expected = _alone(case.family, case.surrogate, *case.shape.items())
    else:
        return 0.0
    pairs = zip((found[0], *found[1]), (expected[0], *expected[1]), strict=True)
    return max(float((ours - theirs).abs().max() / theirs.abs().max()) for ours, theirs in pairs)


def _trained(parallel: dict[str, int], ranks: Ranks) -> tuple[Policy, ScheduledOptimizer]:
    """A policy with moments, in a layout."""
    policy, there = new_policy(Case("qwen3", {}, FOUR_AND_TWO)), arranged(ranks, parallel)
    policy = shard(policy, there.mesh, dtype=WIDE, tensor=there.tensor)
    optimizer = ScheduledOptimizer(policy, constant_rate(1e-2), LearnerSettings())
    for parameter in optimizer.parameters:
        parameter.grad = parameter.detach().square()
    optimizer.step(1)
    return policy, optimizer


def tensors_of(policy: Policy, optimizer: ScheduledOptimizer) -> list[Tensor]:
    """Gather all parameters and moments; every rank must call it."""
    moments = [
        moment
        for parameter in optimizer.parameters
        for _, moment in sorted(optimizer.moments_of(parameter).items())
    ]
    return [whole(tensor).clone() for tensor in (*policy.parameters(), *moments)]


def move(folder: Path, ranks: Ranks) -> list[str]:
    """Save under each of three layouts, and load under the next; what differs."""
    wrong = []
    layouts = {
        "shards": _trained({}, ranks),
        "copies": _trained({"replicate": 2}, ranks),
        "parts": _trained(PARTS, ranks),
    }
    expected = tensors_of(*layouts["shards"])
    if ranks.is_first:
        torch.save(expected, folder / f"expected-{ranks.size}.pt")
    for name, other in (("shards", "copies"), ("copies", "parts"), ("parts", "shards")):
        checkpoints = Checkpoints(folder / f"{name}-{ranks.size}", keep=1, ranks=ranks)
        path = checkpoints.save(STATE, *layouts[name])
        with torch.no_grad():
            for tensor in layouts[other][1].parameters:
                tensor.zero_()
        checkpoints.load(path, *layouts[other])
        pairs = zip(tensors_of(*layouts[other]), expected, strict=True)
        wrong += [name for ours, theirs in pairs if not torch.equal(ours, theirs)]
    return wrong


def main(folder: Path) -> None:
    """Compare every case, and every wrong variant, and let rank 0 write down what it found."""
    ranks = join("cpu", threads=1)
    found: dict[str, Any] = {
        name: error_of(case, ranks) for name, case in CASES[ranks.size].items()
    }
    for name, (size, case, wrong) in WRONG.items():
        if size == ranks.size:
            found[name] = error_of(CASES[size][case], ranks, wrong)
    found["moved"] = move(folder, ranks)
    if ranks.is_first:
        (folder / f"found-{ranks.size}.json").write_text(json.dumps(found))
    ranks.barrier()
    ranks.destroy_process_group()
