"""What right implementations show against one another, on a model of one's own; tables.

    python -m tests.weights.support.right_engines FOLDER [--dtype float32] [--learner bfloat16]
        [--probes 12] [--episodes 8] [--tokens 48]

vLLM and the small engine sample episodes at several temperatures and score probes, each in a
process of its own; transformers with both attentions scores vLLM's. The learner's policy, in
float32 as on a CPU, or in the engines' dtype as on a card, then scores the same tokens.

The first table has differences of log-probs, nats: on average, at the 99th of a hundred and at
most. The second has probes: how many the judge refuses, and what is shown over what the learner
foretells: least, middle and most of them. Its last rows are of an engine that is wrong: two layers
of its model are exchanged.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.engine.engine import GenerationRequest
from actors.weights.probe import LogprobDifference, ProbeJudge
from broker.protocol.manifest import Probe
from learner.algorithm.microbatch import Sequences
from learner.model.policy import Policy, probe_scores, rounded_logprobs
from learner.weights.probe import NUM_TOKENS, PolicyProbe

TEMPERATURES = (0.6, 0.8, 1.0)
TEXTS = (
    "Tom has 3 apples and buys 4 more. How many apples does he have now?",
    "A box holds 12 pens. Ann fills 5 boxes. How many pens are there?",
    "Write two sentences about the sea.",
    "house:",
)
ENGINES = ("vLLM", "small engine")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

Row = tuple[list[int], list[int], list[float]]
"""Prompt, tokens after it, and the engine's log-probs of these."""
Sampled = dict[str, list[Row]]
"""Temperature, or `probe` -> what an engine made."""


def load(folder: str, dtype: str, attention: str = "sdpa") -> Any:
    """Load a model as an engine would."""
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=DTYPES[dtype], attn_implementation=attention
    ).eval()


def prompts(folder: str) -> list[list[int]]:
    """Write the texts as this model's prompts."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if not tokenizer.chat_template:
        return [tokenizer(text).input_ids for text in TEXTS]
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        for text in TEXTS
    ]
    return [tokenizer(chat, add_special_tokens=False).input_ids for chat in chats]


def varied_probe(policy: Policy, number: int, dtype: torch.dtype) -> Probe:
    """Make a probe as the learner does, with arbitrary tokens and numbers of its own.

    Args:
        policy: The learner's.
        number: Of the probe; the first is that of the learner.
        dtype: That engines compute in.
    """
    made = PolicyProbe(
        partial(probe_scores, policy),
        partial(rounded_logprobs, policy, dtype=dtype),
        num_tokens=NUM_TOKENS,
        vocabulary=policy.vocabulary,
    )
    draw = random.Random(number)
    if number:
        made._token_ids = tuple(draw.randrange(policy.vocabulary) for _ in made._token_ids)
        made._numbers = tuple(draw.random() for _ in made._numbers)
    return made()


async def sample(name: str, folder: str, given: list[list[int]], chosen: Any) -> Sampled:
    """Let an engine sample, and score probes."""
    from actors.engine.torch_engine import TorchOptions, torch_engine
    from actors.engine.vllm_engine import vllm_engine
    from actors.engine.vllm_options import VllmOptions

    engine: Any
    longest = max(map(len, prompts(folder))) + chosen.tokens
    if name == "vLLM":
        options = VllmOptions(folder, max_model_len=longest, dtype=chosen.dtype, kv_cache_gib=1)
        engine = vllm_engine(options)
    else:
        engine = torch_engine(TorchOptions(folder, max_model_len=longest, dtype=chosen.dtype))
    await engine.start()
    starts, found = prompts(folder), Sampled()
    for heat in TEMPERATURES:
        asked = [
            GenerationRequest(str(n), tuple(starts[n % len(starts)]), chosen.tokens, heat, ())
            for n in range(chosen.episodes)
        ]
        made: dict[str, tuple[list[int], list[float]]] = {r.request_id: ([], []) for r in asked}
        engine.submit(asked)
        left = len(asked)
        while left:
            for delta in await engine.deltas():
                made[delta.request_id][0].extend(delta.token_ids)
                made[delta.request_id][1].extend(delta.logprobs)
                left -= delta.finish_reason is not None
        found[f"{heat:g}"] = [(list(r.token_ids), *made[r.request_id]) for r in asked]
    found["probe"] = [(ids[:1], ids[1:], list(await engine.probe(tuple(ids)))) for ids in given]
    await engine.close()
    return found


@torch.no_grad()
def by_policy(policy: Policy, rows: list[Row], heat: float) -> Tensor:
    """Score packed sequences with the learner's model. Shape [rows, tokens]."""
    places, at = [], 0
    for prompt, made, _ in rows:
        places.append(torch.arange(len(prompt), len(prompt) + len(made)) + at)
        at += len(prompt) + len(made)
    packed = Sequences.from_token_ids([(*prompt, *made) for prompt, made, _ in rows])
    scores: Tensor = policy(packed, torch.cat(places), temperature=heat).logprobs_N
    return scores.double().view(len(rows), -1)


@torch.no_grad()
def by_transformers(model: Any, rows: list[Row], heat: float) -> Tensor:
    """Score sequences one by one. Shape [rows, tokens]."""
    found = []
    for prompt, made, _ in rows:
        ids = torch.tensor([prompt + made])
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        scores = (logits / heat).log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])
        found.append(scores[:, 0].double())
    return torch.stack(found)


Scored = Callable[[list[Row], float], Tensor]


def measure(
    folder: str, policy: Policy, expected: list[Probe], sampled: dict[str, Sampled], dtype: str
) -> None:
    """Score with all implementations and print the tables."""
    learner = str(next(policy.parameters()).dtype).removeprefix("torch.")
    others: dict[str, Scored] = {}
    for attention in ("eager", "sdpa"):
        model = load(folder, dtype, attention)
        others[f"transformers {attention}"] = partial(by_transformers, model)
    own = {name: _own(policy, each) for name, each in sampled.items()}
    for heat in map("{:g}".format, TEMPERATURES):
        for name, each in sampled.items():
            theirs = torch.tensor([row[2] for row in each[heat]]).double()
            _print(learner, f"{name} {dtype}", heat, theirs - own[name][heat])
        for name, score in others.items():
            theirs = score(sampled["vLLM"][heat], float(heat))
            _print(learner, f"{name} {dtype}", heat, theirs - own["vLLM"][heat])
    asked = sampled["vLLM"]["probe"]
    shown = {name: [row[2] for row in each["probe"]] for name, each in sampled.items()}
    shown |= {name: score(asked, 1.0).tolist() for name, score in others.items()}
    wrong = _exchanged(load(folder, dtype))
    shown["two layers exchanged"] = [
        by_transformers(next(wrong), [row], 1.0)[0].tolist() for row in asked
    ]
    for name, scores in shown.items():
        found = [
            LogprobDifference.from_logprobs(own, e.logprobs)
            for own, e in zip(scores, expected, strict=True)
        ]
        print("|", " | ".join((learner, f"{name} {dtype}", *judged(found, expected, dtype))), "|")


def _own(policy: Policy, sampled: Sampled) -> dict[str, Tensor]:
    return {f"{t:g}": by_policy(policy, sampled[f"{t:g}"], t) for t in TEMPERATURES}


def _print(learner: str, name: str, heat: str, off: Tensor) -> None:
    off = off.abs()
    p99 = float(off.flatten().quantile(0.99))
    print(f"| {learner} | {name} | {heat} | {off.mean():.2g} | {p99:.2g} | {off.max():.2g} |")


def judged(found: list[LogprobDifference], expected: list[Probe], dtype: str) -> list[str]:
    """Write how many of an engine's probes are refused, and how they spread."""
    pairs = list(zip(found, expected, strict=True))
    refused = sum(not f.is_within(ProbeJudge(None).bound(e, dtype)) for f, e in pairs)
    spreads = (
        [each.mean for each in found],
        [f.mean / e.rounding_mean for f, e in pairs],
        [f.largest / e.rounding_max for f, e in pairs],
    )
    return [f"{refused} of {len(pairs)}", *map(spread, spreads)]


def _exchanged(model: Any) -> Any:
    """Exchange two layers, others each time; endless."""
    layers, draw = model.base_model.layers, random.Random(0)
    while True:
        one, other = draw.sample(range(len(layers)), 2)
        layers[one], layers[other] = layers[other], layers[one]
        yield model
        layers[one], layers[other] = layers[other], layers[one]


def spread(values: list[float]) -> str:
    """Write the least of them, the middle and the largest."""
    return ", ".join(f"{x:.2g}" for x in (min(values), statistics.median(values), max(values)))


def main() -> None:
    """Run each engine in a process of its own, then all others here."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the engines")
    parser.add_argument("--learner", choices=DTYPES, default="float32")
    parser.add_argument("--probes", type=int, default=12)
    parser.add_argument("--episodes", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--child", nargs=2, default=None, help="engine, and file with probes")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.child is not None:
        name, path = chosen.child[0], Path(chosen.child[1])
        given = json.loads(path.read_text())
        path.write_text(json.dumps(asyncio.run(sample(name, chosen.folder, given, chosen))))
        os._exit(0)  # vLLM's threads end with the process
    policy = Policy(load(chosen.folder, chosen.learner), temperature=1.0).eval()
    dtype = DTYPES[chosen.dtype]
    expected = [varied_probe(policy, number, dtype) for number in range(chosen.probes)]
    sampled: dict[str, Sampled] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sampled.json"
        for name in ENGINES:
            path.write_text(json.dumps([probe.token_ids for probe in expected]))
            again = [sys.executable, "-m", __spec__.name, *sys.argv[1:], "--child", name, str(path)]
            subprocess.run(again, check=True)
            sampled[name] = json.loads(path.read_text())
    measure(chosen.folder, policy, expected, sampled, chosen.dtype)


if __name__ == "__main__":
    main()
