"""Faults of named size, planted into versions of the demo: which check sees which.

    nyala up configs/demo.yaml --set run.name=probe --set learner.checkpoint_every=1 \\
        --set learner.keep_checkpoints=200 --fresh
    python -m tests.weights.support.probe_study --cases 200 --demo runs/probe

A case is a version of that run, the dtype that is published, and that of the learner: float32, as
on a CPU, or the published one, as on a card. Right engines are transformers' with another attention
and the same weights in float32. A layer, or the output layer with the embedding tied to it, is that
of 1, 4 or 16 versions before; two layers are exchanged; an adapter (the change of every matrix
since the first version, to rank 4) is added twice. For each the probe decides. A temperature that
is off shows in the learner's figures instead, over so many tokens that an engine has sampled.
"""

from __future__ import annotations

import copy
import random
from collections import defaultdict
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM

from actors.weights.probe import LogprobDifference, ProbeJudge
from learner.model.policy import Policy, probe_scores, rounded_logprobs
from learner.reporting.advice.training_rules import temperature_excess
from learner.weights.probe import NUM_TOKENS, PolicyProbe
from tests.weights.support.right_engines import spread

AGES = (1, 4, 16)
RANK = 4
FIRST, LAST = 17, 119
SHARES = (0.02, 0.05, 0.1)
TOKENS = (64, 256, 1024)
ROW = 8
"""Tokens of an episode."""
MUST_SEE = {"a layer of 16 versions before", "two layers exchanged", "an adapter added twice"}
PREFIX = "model.causal_lm."


class Versions:
    """The versions of a run that has kept a checkpoint of each."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._shape = AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32)

    @cache  # noqa: B019 - lives as long as the study
    def weights(self, step: int) -> dict[str, Tensor]:
        path = self._run / "checkpoints" / f"step-{step:06d}" / "tensors-0.safetensors"
        with safe_open(path, "pt") as file:
            names = [name for name in file.keys() if name.startswith(PREFIX)]  # noqa: SIM118
            return {name.removeprefix(PREFIX): file.get_tensor(name) for name in names}

    def model(self, weights: dict[str, Tensor], dtype: torch.dtype, attention: str = "sdpa") -> Any:
        model = copy.deepcopy(self._shape)
        model.load_state_dict(weights, strict=False)  # a tied output layer has no name
        model.set_attn_implementation(attention)
        for parameter in model.parameters():  # its buffers stay in float32, as an engine's do
            parameter.data = parameter.data.to(dtype)
        return model.eval()


def study(run: Path, cases: int) -> bool:
    """Run cases and print the tables; False if one of them was judged wrongly.

    A row has a fault, the dtype that is published, in how many cases it was seen, and of the probe
    how many times the bound it showed, on average: least, middle and largest.
    """
    versions, right, refused = Versions(run), list[float](), 0
    seen: dict[tuple[str, str], list[bool]] = defaultdict(list)
    shown: dict[tuple[str, str], list[float]] = defaultdict(list)
    for number in range(cases):
        draw = random.Random(number)
        step, wire = draw.randint(FIRST, LAST), draw.choice([torch.float32, torch.bfloat16])
        learner = draw.choice([torch.float32, wire])
        dtype = str(wire).removeprefix("torch.")
        weights = versions.weights(step)
        policy = Policy(versions.model(weights, learner), temperature=1.0).eval()
        expected = PolicyProbe(
            partial(probe_scores, policy),
            partial(rounded_logprobs, policy, dtype=wire),
            num_tokens=NUM_TOKENS,
            vocabulary=policy.vocabulary,
        )()
        bound = ProbeJudge(None).bound(expected, dtype)

        def of(model: Any) -> LogprobDifference:
            own = _logprobs(model, expected.token_ids)  # noqa: B023 - called within the round
            return LogprobDifference.from_logprobs(own, expected.logprobs)  # noqa: B023

        published = {name: tensor.to(wire).float() for name, tensor in weights.items()}
        for engine in (
            versions.model(weights, wire, "eager"),
            versions.model(published, torch.float32),
        ):
            found = of(engine)
            right.append(found.mean / bound.mean)
            refused += not found.is_within(bound)
        for fault, wrong in _faults(versions, step, draw):
            found = of(versions.model(wrong, wire, "eager"))
            seen[fault, dtype].append(not found.is_within(bound))
            shown[fault, dtype].append(found.mean / bound.mean)
        for fault, is_seen in _temperatures(versions.model(weights, wire, "eager"), policy, draw):
            seen[fault, dtype].append(is_seen)
    print(f"the demo: right engines refused {refused} of {len(right)}; most {max(right):.2g}")
    for (fault, dtype), hits in sorted(seen.items()):
        times = spread(shown[fault, dtype]) if (fault, dtype) in shown else ""
        print(f"| {fault} | {dtype} | {sum(hits)} of {len(hits)} | {times} |")
    must = MUST_SEE | {_name_of(share, TOKENS[-1]) for share in SHARES[-1:]}
    return not refused and all(all(hits) for (fault, _), hits in seen.items() if fault in must)


def _faults(
    versions: Versions, step: int, draw: random.Random
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    right = versions.weights(step)
    layers = sorted({name.split(".")[2] for name in right if name.startswith("model.layers.")})
    one, other = draw.sample(layers, 2)
    for age in AGES:
        old = versions.weights(step - age)
        of_layer = {name: old[name] for name in right if f".layers.{one}." in name}
        yield f"a layer of {age} versions before", {**right, **of_layer}
        of_head = {name: old[name] for name in right if "embed_tokens" in name}
        yield f"the tied output layer of {age} versions before", {**right, **of_head}
    exchanged = dict(right)
    for name in right:
        if f".layers.{one}." in name:
            twin = name.replace(f".layers.{one}.", f".layers.{other}.")
            exchanged[name], exchanged[twin] = right[twin], right[name]
    yield "two layers exchanged", exchanged
    first = versions.weights(1)
    twice = dict(right)
    for name, tensor in right.items():
        if tensor.ndim == 2 and ".layers." in name:
            u, s, v = torch.linalg.svd(tensor - first[name], full_matrices=False)
            twice[name] = tensor + (u[:, :RANK] * s[:RANK]) @ v[:RANK]
    yield "an adapter added twice", twice


def _temperatures(model: Any, policy: Policy, draw: random.Random) -> Iterator[tuple[str, bool]]:
    """Sample episodes at temperatures that are off, and let the learner's rule judge them."""
    for share in (0.0, *SHARES):
        heat = 1 + share * draw.choice([-1, 1])
        rows = TOKENS[-1] // ROW
        ids_RT = torch.randint(4, policy.vocabulary, (rows, 4))
        mus = []
        with torch.no_grad():
            for _ in range(ROW):
                logits_RV = model(input_ids=ids_RT, use_cache=False).logits[:, -1].float() / heat
                mu_RV = logits_RV.log_softmax(-1)
                drawn_R1 = mu_RV.exp().multinomial(1)
                mus.append(mu_RV.gather(1, drawn_R1))
                ids_RT = torch.cat([ids_RT, drawn_R1], dim=1)
            logits = policy_logits(policy, ids_RT)[:, 3:-1].log_softmax(-1)
        mu_RT = torch.cat(mus, dim=1)
        pi_RT = logits.gather(-1, ids_RT[:, 4:, None])[..., 0]
        lean_RT = pi_RT - (logits.exp() * logits).sum(-1)
        for number in TOKENS:
            lean, log_rho = (x.double().flatten()[:number] for x in (lean_RT, pi_RT - mu_RT))
            weight = float(lean.square().sum())
            batch: Any = SimpleNamespace(
                lag0_temperature_weight=weight,
                lag0_temperature_excess=float((lean * log_rho).sum()) / max(weight, 1e-9),
            )
            yield _name_of(share, number), bool(temperature_excess([batch]))


def policy_logits(policy: Policy, ids_RT: Tensor) -> Tensor:
    """Logits of the learner's weights in its own dtype, by transformers: rounding is its own."""
    model = copy.deepcopy(policy.causal_lm)
    model.set_attn_implementation("sdpa")
    logits: Tensor = model(input_ids=ids_RT, use_cache=False).logits.float()
    return logits


def _name_of(share: float, tokens: int) -> str:
    return f"temperature off by {share:g}, {tokens} tokens"


@torch.no_grad()
def _logprobs(model: Any, token_ids: tuple[int, ...]) -> list[float]:
    ids = torch.tensor([token_ids])
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    found: list[float] = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].tolist()
    return found
