"""Small random models of the architectures that are supported, and how the learner reads them.

What it reads is compared, to the bit, with what transformers loads.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from learner.model.policy import Policy, shard
from learner.model.ranks import Ranks
from learner.model.saved_model import Box, allocate, empty_causal_lm, read_weights
from learner.model.tensor_parallel import UNDIVIDED, TensorGroup

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
FAMILIES = ("qwen3", "llama", "gemma2", "gemma3_text", "granite")
OFFSETS_LOST = "offsets lost"


def make_random_model(model_type: str, **changes: Any) -> PreTrainedModel:
    """Make a random model with 48 tokens in float32."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**SIZE | ARCHITECTURES[model_type] | changes)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model.eval()


def save_random_model(folder: Path, model_type: str, **changes: Any) -> None:
    """Write a random model with 48 tokens in float32."""
    make_random_model(model_type, **changes).save_pretrained(folder)


def save_in_files(
    folder: Path, family: str, *, tied: bool = True, small_files: bool = False, **sizes: int
) -> None:
    """Write a random model; in small files, in bfloat16 and cut where transformers cuts it."""
    model = make_random_model(
        family, tie_word_embeddings=tied, vocab_size=49, **sizes
    )  # odd: uneven parts
    if small_files:
        model.bfloat16().save_pretrained(folder, max_shard_size="60KB")
    else:
        model.save_pretrained(folder)


def differences(
    folder: Path, mesh: DeviceMesh | None, tensor: TensorGroup = UNDIVIDED
) -> list[str]:
    """Names of tensors that are not, to the bit, those of transformers; collective.

    Args:
        folder: Of the model.
        mesh: To shard over; None = not at all.
        tensor: Ranks that divide matrices.
    """
    causal_lm = empty_causal_lm(folder)
    policy = Policy(causal_lm, temperature=1.0).eval()
    if mesh is not None:
        shard(policy, mesh, dtype=torch.float32, tensor=tensor)
    allocate(policy, torch.device("cpu"))
    read_weights(causal_lm, folder)
    ours = _named(causal_lm)
    theirs = _named(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    found = sorted(ours.keys() ^ theirs.keys())
    for name in sorted(ours.keys() & theirs.keys()):  # in the same order on all ranks
        own = ours[name].detach()
        whole = own.full_tensor() if isinstance(own, DTensor) else own
        if whole.dtype != theirs[name].dtype or not torch.equal(whole, theirs[name]):
            found.append(name)
    return found + sorted({*_ties(ours)} ^ {*_ties(theirs)})


def _named(model: nn.Module) -> dict[str, Tensor]:
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def _ties(named: dict[str, Tensor]) -> list[str]:
    names = defaultdict(list)
    for name, tensor in named.items():
        names[id(tensor)].append(name)
    return [" = ".join(sorted(each)) for each in names.values() if len(each) > 1]


def differences_on_meshes(folder: Path, ranks: Ranks) -> dict[str, list[str]]:
    """Compare each model of a folder on two ranks: sharded, and as replicas of shards."""
    found = {f.name: differences(f, ranks.mesh) for f in sorted(folder.iterdir())}
    some = folder / FAMILIES[0]
    for shape in ((2, 1), (1, 2)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        found[str(shape)] = differences(some, mesh)
    with mock.patch("learner.model.saved_model.box_of", _first_box):
        found[OFFSETS_LOST] = differences(some, ranks.mesh)
    return found


def _first_box(tensor: Tensor) -> Box:
    return Box(tuple(tensor.shape), (0,) * tensor.ndim)
