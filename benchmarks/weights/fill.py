"""CPU seconds of one fill of the CPU engine's shadow copy: by vLLM's loader, by the plan.

    python -m benchmarks.weights.fill [--width 128] [--layers 4]

`packing` is the part of the plan that packs matrices for the CPU's kernels, which any fill has to
do. All three take turns in one run; each figure is the least of several. Wants vLLM on a CPU.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from benchmarks.support.machine import describe_machine
from benchmarks.weights.pause import VOCABULARY, _save_model

ROUNDS = 15


@torch.no_grad()
def measure(folder: Path, width: int, layers: int) -> dict[str, float]:
    """Fill the copy of a model, again and again."""
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
    packed = {n: m for n, m in shadow._shadow.named_modules() if PACKED in vars(m)}
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
    stepper.close()
    ms = {f"{name}_ms": round(1000 * seconds, 2) for name, seconds in least.items()}
    return {
        **ms,
        "loader_over_plan": round(least["loader"] / least["plan"], 2),
        "making_the_plan_ms": round(1000 * planned_s, 1),
        "parameters": sum(t.numel() for t in tensors.values()),
    }


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), chosen.width, chosen.layers)
    print(json.dumps({"machine": describe_machine(), "vocabulary": VOCABULARY, **found}, indent=1))


if __name__ == "__main__":
    main()
