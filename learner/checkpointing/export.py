"""Export of the trained model as a Hugging Face directory, as `transformers` and vLLM load it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import AutoModelForCausalLM, AutoTokenizer

from configs import durable
from configs.settings import RunSettings
from learner.model.policy import Policy
from learner.model.ranks import Ranks


def save_model(policy: Policy, run: RunSettings, folder: Path, ranks: Ranks) -> None:
    """Write model and tokenizer; collective."""
    whole = get_model_state_dict(
        policy.causal_lm, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    if not ranks.is_first:
        return
    # A plain copy: saving reads parameters in ways that sharded ones do not allow.
    causal_lm = AutoModelForCausalLM.from_config(policy.causal_lm.config)
    causal_lm.load_state_dict(whole)
    causal_lm.generation_config = policy.causal_lm.generation_config
    unfinished = folder.with_name(f".unfinished-{folder.name}")
    durable.DISK.remove(unfinished)
    durable.make_private_folder(unfinished)
    causal_lm.to(getattr(torch, run.dtype)).save_pretrained(unfinished)
    AutoTokenizer.from_pretrained(run.model_path, mistral_format=False).save_pretrained(unfinished)
    durable.DISK.remove(folder)
    durable.sync_tree(unfinished)
    durable.move(unfinished, folder)
