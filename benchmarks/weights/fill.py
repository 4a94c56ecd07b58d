"""CPU seconds of one fill of the CPU engine's shadow copy: by vLLM's loader, by the plan.

`packing` is the part of the plan that packs matrices for the CPU's kernels, which any fill has to
do. All three take turns in one run; each figure is the least of several. Wants vLLM on a CPU.

A fill happens once a version. `sampling_ms` is what the same engine takes for the demo's share of
one actor in a version, every episode of full length.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from actors.engine.engine import GenerationRequest
from benchmarks.weights.pause import VOCABULARY, _save_model

ROUNDS = 15
EPISODES, PROMPT_TOKENS, COMPLETION_TOKENS = 128, 9, 12
"""Of configs/demo.yaml: half of a batch, for one of its two actors."""


@torch.no_grad()
def fill(folder: Path, *, width: int, layers: int) -> dict[str, float]:
    """Fill the copy of a model, again and again, and sample what is sampled between two fills."""
    from actors.engine.vllm_engine import VllmStepper
    from actors.engine.vllm_options import VllmOptions
    from actors.engine.vllm_private import PACKED
    from broker.protocol.manifest import TensorSpec

    model = _save_model(folder, width, layers)
    stepper = VllmStepper(VllmOptions(str(folder), max_model_len=256, max_concurrent=32))
    stepper.start()
    shadow = stepper._shadow
    assert shadow is not None
    tensors = {name: p.detach().clone() for name, p in model.named_parameters()}
    specs = tuple(TensorSpec(n, "float32", tuple(t.shape), 0, 0) for n, t in tensors.items())
    begun = time.process_time()
    plan = shadow.plan_for(specs)
    planned_s = time.process_time() - begun
    assert plan is not None
    packed: dict[str, Any] = {n: m for n, m in shadow._shadow.named_modules() if PACKED in vars(m)}
    weights = {
        name: plan.whole(f"{name}.weight", tensors)
        for name, layer in packed.items()
        if not layer.weight.numel()
    }

    def pack() -> None:
        for name, layer in packed.items():
            if name in weights:
                layer.weight = nn.Parameter(weights[name], requires_grad=False)
            layer.quant_method.process_weights_after_loading(layer)

    arms: dict[str, Callable[[], object]] = {
        "loader": lambda: shadow.load(tensors),
        "plan": lambda: shadow.copy(plan, tensors),
        "packing": pack,
    }
    least = dict.fromkeys(arms, float("inf"))
    for _ in range(ROUNDS):
        for name, arm in arms.items():
            begun = time.thread_time()
            arm()
            least[name] = min(least[name], time.thread_time() - begun)
    least["sampling"] = min(_sampling_s(stepper, start) for start in range(3))
    stepper.close()
    ms = {f"{name}_ms": round(1000 * seconds, 2) for name, seconds in least.items()}
    return {
        **ms,
        "loader_over_plan": round(least["loader"] / least["plan"], 2),
        "share_of_actor": round(least["plan"] / (least["plan"] + least["sampling"]), 4),
        "share_of_actor_by_loader": round(
            least["loader"] / (least["loader"] + least["sampling"]), 4
        ),
        "making_the_plan_ms": round(1000 * planned_s, 1),
        "parameters": sum(t.numel() for t in tensors.values()),
    }


def _sampling_s(stepper: Any, start: int) -> float:
    """Return CPU seconds of the process for the demo's episodes of one actor and version."""
    for number in range(EPISODES):
        token_ids = tuple(2 + (number * 7 + i) % (VOCABULARY - 2) for i in range(PROMPT_TOKENS))
        key = 1 + start * EPISODES + number
        stepper.admit(
            key,
            GenerationRequest(str(key), token_ids, COMPLETION_TOKENS, 1.0, ()),
            COMPLETION_TOKENS,
        )
    began = time.process_time()
    while stepper.has_work:
        list(stepper.step())
    return time.process_time() - began
