"""Small random models of the architectures that are supported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

SIZE: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": None},
    "gemma": {},
    "gemma2": {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 1.0, "sliding_window": 4},
    "gemma3_text": {"sliding_window": 4, "final_logit_softcapping": 2.0},
    "phi3": {"partial_rotary_factor": 1.0},
    "olmo2": {},
    "granite": {"logits_scaling": 4.0, "residual_multiplier": 0.5, "embedding_multiplier": 3.0},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {"logit_scale": 0.25, "sliding_window": 4},
}


def make_random_model(model_type: str, **changes: Any) -> PreTrainedModel:
    """Make a random model with 48 tokens in float32."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**SIZE | ARCHITECTURES[model_type] | changes)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model.eval()


def save_random_model(folder: Path, model_type: str, **changes: Any) -> None:
    """Write a random model with 48 tokens in float32."""
    make_random_model(model_type, **changes).save_pretrained(folder)
