"""Small initial models for runs without a pretrained one: made, then trained on demonstrations.

Run by `python -m learner warm-start`, which the console starts where `run.model` has to be made. An
export of the actors has made the tokenizer and the demonstrations in tokens. Prints one JSON line
for each step, for a progress bar, and leaves a Hugging Face directory with model and tokenizer.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from buffer.record.demonstrations import Demonstrations
from configs.errors import SettingsError
from configs.settings import LearnerSettings
from learner.model.policy import Policy
from learner.reporting.figures import SUPERVISED_FILE
from learner.training.optimizer import Schedule, ScheduledOptimizer

from .supervised import RowOrder, SupervisedTraining

HEAD_WIDTH = 32  # the narrowest head that the CPU attention of vLLM accepts
REPORT_EVERY_S = 0.2  # a progress bar redraws no faster


def make_model(
    tokenizer: PreTrainedTokenizerFast, *, layers: int, width: int, tied: bool, seed: int
) -> Qwen3ForCausalLM:
    """Make a Qwen3 with random weights: heads 32 wide, half as many for keys and values.

    Seeds torch's random number generators of this process.

    Raises:
        SettingsError: `width` is not a multiple of 64.
    """
    if width % (2 * HEAD_WIDTH):
        raise SettingsError(
            f"learner.init_width must be a multiple of {2 * HEAD_WIDTH}, got {width}; set it to "
            f"{max(1, width // (2 * HEAD_WIDTH)) * 2 * HEAD_WIDTH}: heads are {HEAD_WIDTH} wide "
            "and come in pairs"
        )
    heads = width // HEAD_WIDTH
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    assert isinstance(pad, int) and isinstance(end, int)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=HEAD_WIDTH,
        max_position_embeddings=int(tokenizer.model_max_length),
        tie_word_embeddings=tied,
        pad_token_id=pad,
        eos_token_id=end,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(config)


def warm_start(learner: LearnerSettings, *, seed: int, demonstrations: Path, out: Path) -> None:
    """Make the model of the exported tokenizer, train it on the demonstrations, save it to `out`.

    Prints one JSON line of progress every 0.2 s at most.

    Raises:
        SettingsError: As `make_model` raises it.
        RecordError: There are no demonstrations although `learner.warm_start_steps` is set.
    """
    torch.set_num_threads(learner.threads)
    tokenizer = AutoTokenizer.from_pretrained(demonstrations / "tokenizer")
    model = make_model(
        tokenizer,
        layers=learner.init_layers,
        width=learner.init_width,
        tied=learner.init_tied,
        seed=seed,
    )
    model.eval()
    lines = []
    if learner.warm_start_steps:
        lines = _train(model, learner, seed=seed, rows=Demonstrations.read(demonstrations))
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / SUPERVISED_FILE).write_text("".join(lines), encoding="utf-8")


def _train(
    model: Qwen3ForCausalLM, learner: LearnerSettings, *, seed: int, rows: Demonstrations
) -> list[str]:
    """Train the model, and return the figures of each step as JSON lines."""
    policy, steps = Policy(model, temperature=1.0), learner.warm_start_steps
    schedule = Schedule(
        peak=learner.warm_start_lr,
        warmup_steps=steps // 20,
        decay="cosine",
        min_ratio=0.1,
        steps=steps,
    )
    batch = learner.warm_start_batch
    training = SupervisedTraining(
        policy,
        ScheduledOptimizer(policy, schedule, learner),
        rows,
        RowOrder(num_rows=rows.num_trained, batch=batch, total=steps * batch, seed=seed),
        microbatch_tokens=lambda _step: learner.microbatch_tokens,
    )
    lines, began, reported = [], time.time(), 0.0
    for trained in training.train():
        now = time.time()
        figures = {**trained.as_line(), "time": now, "wall_s": round(now - began, 3)}
        lines.append(json.dumps(figures) + "\n")
        if now - reported >= REPORT_EVERY_S or trained.step == steps:
            reported = now
            progress = {"stage": "warm-start", "steps": steps, **figures}
            sys.stdout.write(json.dumps(progress) + "\n")
            sys.stdout.flush()
    return lines
