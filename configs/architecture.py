"""A run's model by its `config.json`: whether it can be trained, how it is run, its longest text.

Ratios compare the learner's log-probs with the sampler's, so the learner must compute exactly what
the sampler did. A model that departs from the common decoder is run as it is defined, or refused by
name. Imports no torch: `nyala up --dry-run` asks, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from configs.tables.all_tables import AllTables
from configs.tables.run import RunSettings

from .errors import SettingsError

CAP = "final_logit_softcapping"
FACTORS: Mapping[str, tuple[str, bool]] = {
    "cohere": ("logit_scale", True),
    "cohere2": ("logit_scale", True),
    "granite": ("logits_scaling", False),
    "granite_swa": ("logits_scaling", False),
    "hyperclovax": ("logits_scaling", True),
}
"""Type of model -> its factor of the logits, and whether they are multiplied with it or divided."""

UNKNOWN_CHANGES = (
    "lm_head_multiplier",
    "logits_mup_width_multiplier",
    "logits_soft_cap",
    "output_logit_soft_cap",
)
SCALED_BY_LENGTH = ("longrope", "dynamic")
"""Rotary embeddings whose factors depend on the length of a text or of a batch."""
WINDOWS_DIFFER = ("cohere2",)
"""Types of models whose sliding windows vLLM and transformers understand differently."""
LENGTHS = (
    "max_position_embeddings",
    "max_seq_len",
    "max_seq_length",
    "max_sequence_length",
    "n_positions",
    "seq_length",
)
"""Names under which configurations have the longest text of a model."""
STRETCHED = ("dynamic", "linear", "ntk")
"""Rotary embeddings that reach `factor` times as far as the configuration's longest text."""

NUMBERS_OF_EXPERTS = (
    "moe_num_experts",
    "n_routed_experts",
    "num_experts",
    "num_local_experts",
    "num_routed_experts",
)


@dataclass(frozen=True, slots=True)
class LogitChange:
    """Change of the logits between a model's output layer and its softmax.

    Formula: `cap * tanh(x / cap)` of `x = factor * layer(states)`; without a cap, `x`.
    """

    factor: float = 1.0
    cap: float | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read the change from a model's `config.json`; a field that it lacks changes nothing."""
        name, multiplies = FACTORS.get(config.get("model_type", ""), ("", True))
        factor = float(config.get(name) or 1.0)
        return cls(factor if multiplies else 1 / factor, config.get(CAP))


def attention_of(config: Mapping[str, Any]) -> str:
    """Return the implementation of attention that computes what this model defines.

    It is a name of transformers: `sdpa`, or `eager` for a model such as Gemma-2, which caps the
    logits of its attention: SDPA leaves out that cap.
    """
    return "sdpa" if config.get("attn_logit_softcapping") is None else "eager"


def check_architecture(config: Mapping[str, Any], *, tokens: int = 0) -> None:
    """Refuse a model that cannot be trained, or whose ratios would be wrong.

    Args:
        config: The model's `config.json`.
        tokens: Longest episode with its prompt; 0 = not known, and not checked.

    Raises:
        SettingsError: The model is not a causal language model, has experts, quantized weights or
            an unknown change of its logits, or computes such long episodes otherwise in vLLM.
    """
    name = (config.get("architectures") or ["ForCausalLM"])[0]
    if not name.endswith("ForCausalLM"):
        raise SettingsError(
            f"run.model must be a causal language model for text, whose architecture ends in "
            f"ForCausalLM, got {name}; choose another model, or the text part of this one"
        )
    experts = max(_number(config.get(key)) for key in NUMBERS_OF_EXPERTS)
    if experts > 1:
        raise SettingsError(
            f"run.model must be a dense model, got {name} with {experts} experts; choose a model "
            "without experts: which of them the sampler chose is not recorded, and ratios would be "
            "wrong"
        )
    changes = [key for key in UNKNOWN_CHANGES if config.get(key) not in (None, 1.0)]
    if changes:
        raise SettingsError(
            f"run.model must change its logits in a supported way (docs/models.md), got {name} "
            f"with {', '.join(changes)}; choose another model"
        )
    if config.get("quantization_config"):
        raise SettingsError(
            f"run.model must have weights that can be trained, got {name} with a "
            f"quantization_config; take the model that was not quantized"
        )
    rope = _rope_of(config)
    short = config.get("original_max_position_embeddings") or rope.get(
        "original_max_position_embeddings", tokens
    )
    if rope.get("rope_type", rope.get("type")) in SCALED_BY_LENGTH and tokens > short:
        raise SettingsError(
            f"run.max_prompt_tokens + run.max_completion_tokens must be <= {short} for {name}, got "
            f"{tokens}; lower one of them: beyond it, vLLM and the learner rotate positions by "
            "different factors"
        )
    window = config.get("sliding_window")
    if config.get("model_type") in WINDOWS_DIFFER and window and tokens > window:
        raise SettingsError(
            f"run.max_prompt_tokens + run.max_completion_tokens must be <= {window} for {name}, "
            f"got {tokens}; lower one of them: its windows of attention are one token longer in "
            "vLLM than in transformers"
        )


def check_context(config: Mapping[str, Any], settings: AllTables) -> str:
    """Refuse episodes, or an `actors.max_model_len`, that are longer than the model's context.

    Args:
        config: The model's `config.json`.
        settings: Settings of the run.

    Returns:
        A line for the list of checks: how many tokens of the context are used, or that
        `config.json` has no length.

    Raises:
        SettingsError: One is too long; the text names the setting, and the most that fits.
    """
    context = context_of(config)
    if context is None:
        return "config.json names no longest text"
    run, engine = settings.run, settings.actors.max_model_len
    tokens = run.max_prompt_tokens + run.max_completion_tokens
    if tokens > context:
        left = context - run.max_prompt_tokens
        advice = (
            f"lower run.max_completion_tokens to {left}"
            if left > 0
            else f"lower run.max_prompt_tokens, which alone is {run.max_prompt_tokens}"
        )
        raise SettingsError(
            f"run.max_prompt_tokens + run.max_completion_tokens must be <= {context}, the context "
            f"of run.model, got {run.max_prompt_tokens} + {run.max_completion_tokens} = {tokens}; "
            f"{advice}, or choose a model with a longer context"
        )
    if engine is not None and engine > context:
        raise SettingsError(
            f"actors.max_model_len must be <= {context}, the context of run.model, got {engine}; "
            f"leave it null for what run.max_prompt_tokens and run.max_completion_tokens need"
        )
    return f"{tokens} of {context} tokens"


def context_of(config: Mapping[str, Any]) -> int | None:
    """Return the context of a model, in tokens; None if its `config.json` does not name it."""
    lengths = [length for name in LENGTHS if (length := _number(config.get(name))) > 0]
    if not lengths:
        return None
    rope = _rope_of(config)
    kind, factor = rope.get("rope_type", rope.get("type")), rope.get("factor")
    stretch = factor if kind in STRETCHED and isinstance(factor, int | float) else 1
    return int(min(lengths) * stretch)


def _rope_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0


def present_model(run: RunSettings) -> str:
    """Return the path of the run's model, after checking that a model of `init` is there.

    Raises:
        SettingsError: The model was made on another machine, or not at all.
    """
    if run.model == "init" and not (run.folder / "init").is_dir():
        raise SettingsError(
            f"run.model must have been made where it is init, got no folder {run.model_path} on "
            f"this machine; copy it from where `nyala up` or `nyala init-model` made it, or run "
            f"`nyala init-model` here with the same settings"
        )
    return run.model_path
