"""Engine of an actor: the one that is set or, with `actors.engine: auto`, the quicker one.

On a CPU, vLLM spends Python on each request of a step, and more on each that begins or ends. The
small engine spends it on the step as a whole, but attends to what others have, and multiplies less
well. So it is quicker with very small models and short answers alone. The bounds were measured in
whole rings (`docs/models.md`), and are not measured at each start: that would load both engines,
and to load vLLM takes longer than such a run could gain.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Literal, NamedTuple

from configs.settings import ActorSettings, LearnerSettings, RunSettings, Settings

SMALL_BYTES = 4 * 10**6
"""Weights up to which the small engine is quicker on a CPU: a million float32 parameters."""
SHORT_TOKENS = 32
"""Completions up to which it is."""
MATRICES_OF_A_LAYER = 12
"""Squares of the width in a layer of the models that `init` makes, to the next whole number."""


class Choice(NamedTuple):
    """An engine, and why it is that one."""

    engine: Literal["vllm", "torch"]
    reason: str


def choose_engine(settings: Settings, *, on_gpu: bool) -> Choice:
    """Choose the engine of an actor of this machine.

    Args:
        settings: Of the run.
        on_gpu: The actor has a GPU.
    """
    actors = settings.actors
    if actors.engine != "auto":
        return Choice(actors.engine, "actors.engine is set")
    if own := _of_vllm_alone(actors):
        return Choice("vllm", f"actors.{own} is set")
    if importlib.util.find_spec("vllm") is None:
        return Choice("torch", "vLLM is not installed")
    if on_gpu:
        return Choice("vllm", "it has a GPU")
    return _quicker_on_a_cpu(settings.run, settings.learner)


def engine_of_this_process(settings: Settings) -> Choice:
    """Choose the engine of an actor that is this process."""
    from .device import engine_device  # noqa: PLC0415 - torch

    return choose_engine(settings, on_gpu=engine_device() == "cuda")


def _of_vllm_alone(actors: ActorSettings) -> str | None:
    """Name a setting that the small engine does not have and that is not its default."""
    changed = {
        "tensor_parallel_size": actors.tensor_parallel_size > 1,
        "engine_args": bool(actors.engine_args),
        "in_process": actors.in_process is False,
        "max_concurrent_episodes": actors.max_concurrent_episodes == "auto",
    }
    return next((name for name, is_changed in changed.items() if is_changed), None)


def _quicker_on_a_cpu(run: RunSettings, learner: LearnerSettings) -> Choice:
    num_bytes, tokens = _weights_bytes(run, learner), run.max_completion_tokens
    if num_bytes is None:
        return Choice("vllm", f"{run.model} is not a folder of this machine")
    found = f"weights of {num_bytes / 1e6:.1f} MB, answers of up to {tokens} tokens"
    bounds = f"the small engine is quicker up to {SMALL_BYTES / 1e6:g} MB and {SHORT_TOKENS} tokens"
    is_small = num_bytes <= SMALL_BYTES and tokens <= SHORT_TOKENS
    return Choice("torch" if is_small else "vllm", f"{found}; {bounds}")


def _weights_bytes(run: RunSettings, learner: LearnerSettings) -> int | None:
    """Size of the model's files; of one that `init` has yet to make, about what they will have."""
    files = list(Path(run.model_path).expanduser().glob("*.safetensors"))
    if files:
        return sum(file.stat().st_size for file in files)
    if run.model == "init":
        return 4 * MATRICES_OF_A_LAYER * learner.init_layers * learner.init_width**2
    return None
