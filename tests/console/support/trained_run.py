"""A run with checkpoints after batches 2 and 4 of 9, whose chat model was trained in between."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch

from configs.loader import save
from configs.settings import LearnerSettings, Settings
from learner.checkpointing.checkpoint import Checkpoints
from learner.checkpointing.learner_state import LearnerState
from learner.model.policy import Policy, shard
from learner.model.ranks import Ranks
from learner.model.saved_model import load_causal_lm
from learner.reporting.metrics import Totals
from learner.training.optimizer import ScheduledOptimizer
from tests.learner.support.tiny_policy import constant_rate, save_tiny_model

STATE = LearnerState("r", "h", 1, lineage=4, cursor=0, trained=(), totals=Totals())
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
GENERATION = {"temperature": 0.6, "eos_token_id": [1]}
"""As many models on the hub have it; transformers does not save it again."""


def trained_run(folder: Path, ranks: Ranks, **run: object) -> Path:
    """Make it; the answer is its folder."""
    base = folder / "base"
    tokenizer = save_tiny_model(base)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(base)
    (base / "generation_config.json").write_text(json.dumps(GENERATION), encoding="utf-8")
    tables = {"name": "r", "directory": folder, "model": str(base), "steps": 9}
    tables |= {"environment": "calculator", **run}
    settings = Settings.model_validate({"run": tables})
    settings.run.folder.mkdir()
    save(settings, settings.run.folder / "config.yaml")
    policy = Policy(load_causal_lm(base), temperature=1.0)
    policy = shard(policy, ranks.mesh, dtype=torch.float32)
    optimizer = ScheduledOptimizer(policy, constant_rate(1e-2), LearnerSettings())
    checkpoints = Checkpoints(settings.run.folder / "checkpoints", keep=9, ranks=ranks)
    for step in (2, 4):
        with torch.no_grad():
            policy.causal_lm.lm_head.weight.mul_(1.5)
        checkpoints.save(replace(STATE, step=step), policy, optimizer)
    return settings.run.folder
