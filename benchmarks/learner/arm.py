"""The arms: a step of training, and the output layer alone.

CPU seconds of one thread, because other work on the machine must not decide; the peak is what the
process has grown by. Each arm runs in a process of its own.
"""

from __future__ import annotations

import ctypes
import gc
import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from benchmarks.learner.padded_loop import PaddedLoop, score, score_in_chunks
from benchmarks.learner.trl_loop import TrlLoop
from benchmarks.learner.workload import MOST_TOKENS, make_causal_lm, make_episodes
from buffer.record.episode import Episode
from configs.architecture import LogitChange
from configs.settings import AlgorithmSettings, LearnerSettings
from learner.algorithm.losses import policy_loss
from learner.algorithm.microbatch import Microbatch, PreparedMicrobatch, empty_microbatch
from learner.data.batch import pack, plan_batch
from learner.model.activations import Kept
from learner.model.logits import Softmax
from learner.model.output_layer import score_tokens
from learner.model.policy import Policy, shard
from learner.model.ranks import Ranks, join
from learner.training.optimizer import Schedule, ScheduledOptimizer
from learner.training.step import train_batch

MIB = 2**20
ALGORITHM = AlgorithmSettings()


class OurLoop:
    """This project's step, as the learner takes it."""

    def __init__(
        self,
        budget: int,
        causal_lm: PreTrainedModel,
        *,
        activations: Kept = "none",
        compiled: bool = False,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        longest: int = MOST_TOKENS,
    ) -> None:
        torch.set_num_threads(1)
        self.ranks = _ranks(device)
        self._budget, self._longest = budget, longest
        self.policy = shard(
            Policy(causal_lm, temperature=1.0),
            self.ranks.mesh,
            dtype=dtype,
            activations=activations,
            compiled=compiled,
        )
        constant = Schedule(peak=1e-6, warmup_steps=0, decay="constant", min_ratio=1.0, steps=1)
        self.optimizer = ScheduledOptimizer(self.policy, constant, LearnerSettings())

    def step(self, episodes: list[Episode]) -> object:
        """Train one batch."""
        return self.train(self.pack(episodes))

    def pack(self, episodes: list[Episode]) -> list[Microbatch]:
        """Plan a batch and make its microbatches."""
        return pack_batch(episodes, self._budget, self._longest)

    def train(self, microbatches: list[Microbatch]) -> object:
        """Train a batch that is packed."""
        return train_batch(
            self.policy,
            self.optimizer,
            1,
            microbatches,
            settings=ALGORITHM,
            ranks=self.ranks,
        )


def pack_batch(episodes: list[Episode], budget: int, longest: int) -> list[Microbatch]:
    """Plan a batch as the learner does, and make its microbatches.

    Args:
        episodes: Of the batch.
        budget: Most tokens of a microbatch.
        longest: Most tokens of a completion.
    """
    plan = plan_batch(
        1,
        episodes,
        ranks=1,
        settings=ALGORITHM,
        max_completion_tokens=longest,
        microbatch_tokens=budget,
    )
    return pack(plan, episodes, settings=ALGORITHM, lineages={1: 0}, lineage=1)


@cache
def _ranks(device: str) -> Ranks:
    """Join the only group of this process."""
    return join(device, threads=1)


def step(kind: str, groups: int, budget: int, shortest: int, longest: int) -> dict[str, float]:
    """Train one batch, after a short one that starts every kernel."""
    torch.set_num_threads(1)
    if kind in {"plain", "before", "trl"}:
        train = _beside(kind, budget)
    else:
        kept: Kept = "full" if kind == "checkpointed" else "none"
        train = OurLoop(budget, make_causal_lm(), activations=kept).step
    train(make_episodes(1)[:2])
    episodes = make_episodes(groups, prompts=(shortest, longest))
    figures = measure(lambda: train(episodes))
    return {**figures, "trained_tokens": trained_tokens(episodes)}


def trained_tokens(episodes: list[Episode]) -> int:
    """Count the tokens that a batch trains."""
    return sum(len(episode.completion.token_ids) for episode in episodes)


def _beside(kind: str, budget: int) -> Callable[[list[Episode]], object]:
    causal_lm = make_causal_lm()
    loop = (
        TrlLoop(causal_lm)
        if kind == "trl"
        else PaddedLoop(causal_lm, is_plain=kind == "plain", budget=budget)
    )

    def train(episodes: list[Episode]) -> object:
        return loop.step(episodes, [episode.reward - 0.5 for episode in episodes])

    return train


def output_layer(kind: str, tokens: int, width: int, vocabulary: int) -> dict[str, float]:
    """Forward and backward pass of the output layer; its weight's gradient is there before."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layer = nn.Linear(width, vocabulary, bias=False)
    states_ND = torch.randn(tokens, width, requires_grad=True)
    targets_N = torch.randint(vocabulary, (tokens,))

    plain, settings = Softmax(LogitChange(), 1.0), AlgorithmSettings()
    prepared = _prepared(tokens, vocabulary)

    def loss_of(rows: slice, logprobs_R: torch.Tensor, entropies_R: torch.Tensor) -> torch.Tensor:
        own = prepared.select_tokens(torch.arange(tokens)[rows])
        return policy_loss(logprobs_R, entropies_R, own, settings).loss

    def run() -> None:
        if kind in {"ours", "in_forward"}:
            found = score_tokens(
                layer,
                states_ND,
                targets_N,
                plain,
                entropy_gradient=False,
                loss_of=loss_of if kind == "in_forward" else None,
            )
            scores = found.logprobs_N, found.entropies_N
            loss = found.loss
        else:
            scores = (score if kind == "full" else score_in_chunks)(
                layer.weight, states_ND, targets_N
            )
            loss = None
        (loss_of(slice(None), *scores) if loss is None else loss).backward()

    figures = measure(run)
    return figures | {"peak_mib": figures["peak_mib"] - vocabulary * width * 4 / MIB}


def _prepared(tokens: int, vocabulary: int) -> PreparedMicrobatch:
    """Tokens of a policy that is not far from random logits."""
    microbatch = replace(
        empty_microbatch(),
        indices_N=torch.arange(tokens),
        behaviour_logprobs_N=torch.full((tokens,), -math.log(vocabulary)),
        advantages_N=torch.randn(tokens),
        weights_N=torch.full((tokens,), 1 / tokens),
        lags_N=torch.zeros(tokens, dtype=torch.int64),
        episodes_N=torch.zeros(tokens, dtype=torch.int64),
    )
    return PreparedMicrobatch(microbatch)


def measure(run: Callable[[], object]) -> dict[str, float]:
    """CPU seconds, and how far the process grew meanwhile."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    began = time.process_time()
    run()
    cpu_s = time.process_time() - began
    return {"cpu_s": cpu_s, "peak_mib": (_memory("VmHWM") - before) / MIB}


def _memory(field: str) -> int:
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.split(f"{field}:")[1].split()[0])
