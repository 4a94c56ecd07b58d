"""The probe's bounds over random models: right engines are accepted, wrong ones refused.

    python -m tests.weights.support.probe_study --cases 200 [--learner float32] [--demo RUN]

A case is a random Qwen3 (layers, width, vocabulary, tied or not), scale of logits and dtype. The
learner is the real `Policy` with its real probe; right engines are transformers' forward pass with
another attention, and the same weights computed in float32. Each case lives through four versions,
whose logits grow up to twice. Then faults are planted into the engine at the last one. One that
moves the policy (computed in float32) by half more than the bound must be refused; smaller ones are
only counted.

With `--demo RUN`, a run of the demo that keeps each version, faults of named size follow
(`demo_faults.py`).
"""

from __future__ import annotations

import argparse
import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from actors.weights.probe import LogprobDifference, ProbeJudge
from broker.protocol.manifest import Probe
from learner.model.policy import Policy, probe_scores, rounded_logprobs
from learner.weights.probe import NUM_TOKENS, PolicyProbe
from tests.weights.support import demo_faults

NUM_VERSIONS = 4


@dataclass
class Case:
    """One model and what was seen of it."""

    number: int
    dtype: torch.dtype
    scale: float
    """Standard deviation of the first version's logits."""
    text: str
    right: list[LogprobDifference] = field(default_factory=list)
    """Of right engines, over all versions."""
    refused: int = 0
    """Of them."""
    faults: list[tuple[str, LogprobDifference, bool]] = field(default_factory=list)
    """Name, true difference, and whether it was refused, of faults beyond the bound."""
    smaller: int = 0
    """Faults below it."""

    @property
    def missed(self) -> list[str]:
        """Faults that passed."""
        return [name for name, _, is_refused in self.faults if not is_refused]


def run_case(number: int, *, learner: torch.dtype | None = None) -> Case:
    """Make a model, let it live, and plant faults.

    Args:
        number: What is drawn follows from it.
        learner: Dtype of its arithmetic, float32 on every CPU; None = that of the engines.
    """
    draw = random.Random(number)
    torch.manual_seed(number)
    dtype = torch.float32 if draw.random() < 0.2 else torch.bfloat16
    model, text = _model(draw, dtype)
    case = Case(number, dtype, draw.uniform(0.3, 6.0), text)
    growth, step = draw.uniform(1.0, 2.0), 10 ** draw.uniform(-3, -0.7)
    _set_scale(model, case.scale)
    policy = Policy(_copy(model, "sdpa").to(learner or dtype), temperature=1.0).eval()
    probe = PolicyProbe(
        partial(probe_scores, policy),
        partial(rounded_logprobs, policy, dtype=dtype),
        num_tokens=NUM_TOKENS,
        vocabulary=policy.vocabulary,
        rounded_every=1,  # a version here is as far from the last as many of a run
    )
    judge = ProbeJudge(None)
    first = copy.deepcopy(model)
    wire = str(dtype).removeprefix("torch.")
    for version in range(NUM_VERSIONS):
        if version:
            _move(model, step, growth ** (1 / (NUM_VERSIONS - 1)))
            policy.causal_lm.load_state_dict(model.state_dict())
        expected = probe()
        for engine in RIGHT:
            seen = LogprobDifference.from_logprobs(
                engine(model, expected.token_ids), expected.logprobs
            )
            case.right.append(seen)
            case.refused += not seen.is_within(judge.bound(expected, wire))
    for engine in RIGHT:
        _plant(case, model, first, expected, Engine(engine, judge.bound(expected, wire)))
    return case


@dataclass(frozen=True, slots=True)
class Engine:
    """A right engine, and what its judge accepts by now."""

    logprobs: Callable[[Qwen3ForCausalLM, tuple[int, ...]], list[float]]
    bound: LogprobDifference


def _plant(
    case: Case,
    model: Qwen3ForCausalLM,
    first: Qwen3ForCausalLM,
    expected: Probe,
    engine: Engine,
) -> None:
    true = in_float32(model, expected.token_ids)
    for name, wrong in faults(model, first, random.Random(case.number)):
        moved = LogprobDifference.from_logprobs(in_float32(wrong, expected.token_ids), true)
        seen = LogprobDifference.from_logprobs(
            engine.logprobs(wrong, expected.token_ids), expected.logprobs
        )
        if moved.is_within(engine.bound.times(1.5)):
            case.smaller += 1
        else:
            case.faults.append((name, moved, not seen.is_within(engine.bound)))


def faults(
    model: Qwen3ForCausalLM, first: Qwen3ForCausalLM, draw: random.Random
) -> Iterator[tuple[str, Qwen3ForCausalLM]]:
    """Yield engines whose weights are wrong."""
    wrong = copy.deepcopy(model)
    wrong.lm_head.weight = torch.nn.Parameter(first.lm_head.weight.detach().clone())
    yield "the first version's output layer", wrong
    one, other = draw.sample(range(len(model.model.layers)), 2)
    for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"):
        wrong = copy.deepcopy(model)
        layers = wrong.model.layers
        a, b = (layers[i].get_submodule(name).weight for i in (one, other))
        a.data, b.data = b.data, a.data
        yield f"{name} of two layers exchanged", wrong


def in_eager(model: Qwen3ForCausalLM, token_ids: tuple[int, ...]) -> list[float]:
    """Log-probs of an engine with another attention."""
    return _logprobs(_copy(model, "eager"), token_ids)


def in_float32(model: Qwen3ForCausalLM, token_ids: tuple[int, ...]) -> list[float]:
    """Log-probs of the same weights, computed without rounding to their dtype."""
    return _logprobs(_copy(model, "sdpa").float(), token_ids)


RIGHT = (in_eager, in_float32)


@torch.no_grad()
def _logprobs(model: Qwen3ForCausalLM, token_ids: tuple[int, ...]) -> list[float]:
    ids = torch.tensor([token_ids])
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    found: list[float] = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].tolist()
    return found


def _model(draw: random.Random, dtype: torch.dtype) -> tuple[Qwen3ForCausalLM, str]:
    heads = draw.choice([2, 4])
    config = Qwen3Config(
        vocab_size=draw.choice([64, 512, 4096, 16384]),
        hidden_size=draw.choice([64, 128, 256]),
        intermediate_size=draw.choice([128, 384]),
        num_hidden_layers=draw.choice([2, 4, 8, 16]),
        num_attention_heads=heads,
        num_key_value_heads=draw.choice([1, heads]),
        head_dim=32,
        tie_word_embeddings=draw.random() < 0.5,
        initializer_range=10 ** draw.uniform(-1.5, -0.7),
    )
    model = Qwen3ForCausalLM(config).to(dtype).eval()
    shape = f"{config.num_hidden_layers} x {config.hidden_size}, {config.vocab_size} tokens"
    return model, f"{shape}{', tied' if config.tie_word_embeddings else ''}"


@torch.no_grad()
def _set_scale(model: Qwen3ForCausalLM, scale: float) -> None:
    """Give the logits this standard deviation."""
    ids = torch.arange(64)[None] % model.config.vocab_size
    model.model.norm.weight.mul_(scale / float(model(input_ids=ids).logits.float().std()))


@torch.no_grad()
def _move(model: Qwen3ForCausalLM, step: float, growth: float) -> None:
    """Make the next version: every matrix moves by a share of its size, and logits grow."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.add_(step * parameter.float().std() * torch.randn(parameter.shape))
    model.model.norm.weight.mul_(growth)


def _copy(model: Qwen3ForCausalLM, attention: str) -> Qwen3ForCausalLM:
    copied = copy.deepcopy(model)
    copied.set_attn_implementation(attention)
    return copied


def main() -> int:
    """Run cases and print what was seen; 1 if one of them was judged wrongly."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--demo", type=Path, default=None)
    parser.add_argument("--learner", choices=["float32"], default=None)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    learner = getattr(torch, chosen.learner) if chosen.learner else None
    cases = []
    for number in range(chosen.first, chosen.first + chosen.cases):
        cases.append(case := run_case(number, learner=learner))
        if case.refused or case.missed:
            worst = max(case.right, key=lambda seen: seen.mean)
            print(
                f"case {number} ({case.text}, scale {case.scale:.1f}, {case.dtype}): "
                f"refused {case.refused} right, worst {worst}; missed {case.missed}"
            )
    for dtype in (torch.bfloat16, torch.float32):
        right = [seen for case in cases if case.dtype == dtype for seen in case.right]
        if right:
            worst = LogprobDifference(max(d.mean for d in right), max(d.largest for d in right))
            print(f"{dtype}: right engines differed by {worst}, {len(right)} probes")
    print(
        f"{len(cases)} cases: right engines refused {sum(case.refused for case in cases)} of "
        f"{sum(len(case.right) for case in cases)}, faults missed "
        f"{sum(len(case.missed) for case in cases)} of {sum(len(case.faults) for case in cases)} "
        f"beyond the bound; {sum(case.smaller for case in cases)} smaller ones"
    )
    is_wrong = any(case.refused or case.missed for case in cases)
    if chosen.demo is not None:
        is_wrong |= not demo_faults.study(chosen.demo, chosen.cases)
    return int(is_wrong)


if __name__ == "__main__":
    raise SystemExit(main())
