"""One arm in a process of its own: `python -m benchmarks.learner.arm NAME SIZES`, JSON on stdout.

CPU seconds of one thread, because other work on the machine must not decide; the peak is what the
process has grown by.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from benchmarks.learner.padded_loop import PaddedLoop, score, score_in_chunks
from benchmarks.learner.workload import MOST_TOKENS, make_causal_lm, make_episodes
from buffer.record.episode import Episode
from configs.architecture import LogitChange
from configs.settings import AlgorithmSettings, LearnerSettings
from learner.data.batch import pack, plan_batch
from learner.model.output_layer import Softmax, score_tokens
from learner.model.policy import Policy, shard
from learner.model.ranks import join
from learner.training.optimizer import AdamWithSchedule, Schedule
from learner.training.step import train_batch

MIB = 2**20
HEADS = ("full", "before", "ours")


def main() -> None:
    """Run the arm that the arguments name."""
    torch.set_num_threads(1)
    name, *sizes = sys.argv[1:]
    run = _output_layer if name in HEADS and len(sizes) == 3 else _step
    print(json.dumps(run(name, *map(int, sizes))))


def _step(name: str, groups: int, budget: int, shortest: int, longest: int) -> dict[str, float]:
    """Train one batch, after a short one that starts every kernel."""
    step = _ours(budget) if name == "ours" else _padded(name, budget)
    step(make_episodes(1)[:2])
    episodes = make_episodes(groups, prompts=(shortest, longest))
    figures = measure(lambda: step(episodes))
    return {**figures, "trained_tokens": sum(len(e.completion.token_ids) for e in episodes)}


def _padded(name: str, budget: int) -> Callable[[list[Episode]], object]:
    loop = PaddedLoop(make_causal_lm(), is_plain=name == "plain", budget=budget)

    def step(episodes: list[Episode]) -> object:
        return loop.step(episodes, [episode.reward - 0.5 for episode in episodes])

    return step


def _ours(budget: int) -> Callable[[list[Episode]], object]:
    ranks = join("cpu", threads=1)
    policy = shard(Policy(make_causal_lm(), temperature=1.0), ranks.mesh, dtype=torch.float32)
    constant = Schedule(peak=1e-6, warmup_steps=0, decay="constant", min_ratio=1.0, steps=1)
    optimizer = AdamWithSchedule(policy, constant, LearnerSettings())
    settings = AlgorithmSettings()

    def step(episodes: list[Episode]) -> object:
        plan = plan_batch(
            1,
            episodes,
            ranks=1,
            settings=settings,
            max_completion_tokens=MOST_TOKENS,
            microbatch_tokens=budget,
        )
        microbatches = pack(plan, episodes, settings=settings, lineages={1: 0}, lineage=1)
        return train_batch(policy, optimizer, 1, microbatches, settings=settings, ranks=ranks)

    return step


def _output_layer(name: str, tokens: int, width: int, vocabulary: int) -> dict[str, float]:
    """Forward and backward pass of the output layer; its weight's gradient is there before."""
    torch.manual_seed(0)
    layer = nn.Linear(width, vocabulary, bias=False)
    states_ND = torch.randn(tokens, width, requires_grad=True)
    targets_N = torch.randint(vocabulary, (tokens,))

    def run() -> None:
        if name == "ours":
            plain = Softmax(LogitChange(), 1.0)
            scores = score_tokens(layer, states_ND, targets_N, plain, entropy_gradient=False)
        else:
            scores = (score if name == "full" else score_in_chunks)(
                layer.weight, states_ND, targets_N
            )
        scores[0].sum().backward()

    figures = measure(run)
    return figures | {"peak_mib": figures["peak_mib"] - vocabulary * width * 4 / MIB}


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


if __name__ == "__main__":
    main()
