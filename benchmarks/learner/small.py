"""A step of the demo's size: 256 short episodes, a model of 0.6 M parameters, one thread.

At this size it is the number of operations that costs, not their length. CPU milliseconds of one
step, the median of many: the threads of one core take turns, and a step is short.

    plain      this project's step, as a learner of one rank on a CPU takes it
    mkl        the same with the products that torch chooses (`learner/model/cpu.py`)
    sharded    plain under FSDP2, as several ranks and cards have it
    compiled   plain, with `learner.compile`; its start is beside the median
    trl        the training step of TRL's GRPO trainer on the same episodes, all rows at once
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from actors.engine.character_tokenizer import make_tokenizer
from benchmarks.learner.arm import OurLoop
from benchmarks.learner.trl_loop import HAS_TRL, TrlLoop
from benchmarks.learner.turns import Arm
from benchmarks.learner.workload import make_episode
from buffer.record.episode import Episode
from learner.initial_model import make_model

GROUPS, GROUP_SIZE = 16, 16
PROMPT, COMPLETION = (4, 8), (4, 8)
"""Tokens of a word of three to six letters with its mark, and of an answer: least, and beyond."""
BUDGET = 16384
BATCHES = 64
"""Different ones: as good as none has the number of tokens of another, as in a run."""
WARM_UP = 5


def small_arms(steps: int) -> list[Arm]:
    """Our step in each of its forms, and TRL's."""
    kinds = ("plain", "mkl", "sharded", "compiled", *(["trl"] if HAS_TRL else []))
    return [Arm(f"small_{kind}", small_step, (kind, steps)) for kind in kinds]


def small_step(kind: str, steps: int) -> dict[str, float]:
    """Train as many batches, after some that start every kernel."""
    torch.set_num_threads(1)
    began = time.process_time()
    train, batches = small_loop(kind), [small_batch(seed) for seed in range(BATCHES)]
    for number in range(WARM_UP):
        train(batches[number])
    start_s = time.process_time() - began
    took = []
    for number in range(steps):
        began = time.process_time()
        train(batches[(WARM_UP + number) % BATCHES])
        took.append(time.process_time() - began)
    return {"cpu_s": median(took), "start_cpu_s": start_s}


def small_batch(seed: int) -> list[Episode]:
    """Make the episodes of a batch; their answers are as random as the model's."""
    random = np.random.default_rng(seed)
    vocabulary = len(make_tokenizer([]))
    episodes = []
    for group_id in range(GROUPS):
        size = random.integers(*PROMPT)
        prompt_ids = random.integers(3, vocabulary, size=size, dtype=np.int32)
        for member in range(GROUP_SIZE):
            token_ids = random.integers(
                3, vocabulary, size=random.integers(*COMPLETION), dtype=np.int32
            )
            task_id = group_id * GROUP_SIZE + member
            episodes.append(make_episode(task_id, group_id, prompt_ids, token_ids, vocabulary))
    return episodes


def small_loop(kind: str) -> Callable[[list[Episode]], Any]:
    """Make what trains one batch after the other."""
    model = make_model(make_tokenizer([]), layers=3, width=128, tied=True, seed=0)
    if kind == "trl":
        trl = TrlLoop(model, rows=GROUPS * GROUP_SIZE)
        return lambda episodes: trl.step(episodes, [e.reward - 0.5 for e in episodes])
    with ExitStack() as forced:
        if kind == "sharded":  # one rank on a CPU never is
            forced.enter_context(patch("learner.model.policy.stays_whole", return_value=False))
        if kind == "mkl":
            forced.enter_context(patch("learner.model.cpu.is_faster", return_value=False))
        return OurLoop(BUDGET, model, compiled=kind == "compiled").step
