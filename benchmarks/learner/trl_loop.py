"""The training step of TRL's GRPO trainer, on episodes that were made before.

Needs `trl`, which Nyala itself does not: `pip install --target DIR --no-deps -r
requirements/peers.lock`, then PYTHONPATH=DIR. Nothing is generated: the trainer's own
`training_step` gets what its generation would have handed to it, some rows at a time, padded to
the longest of these (TRL itself pads to the longest of the whole batch).
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from actors.engine.character_tokenizer import make_tokenizer
from benchmarks.learner.padded_loop import ROWS
from buffer.record.episode import Episode

HAS_TRL = importlib.util.find_spec("trl") is not None
LR = 1e-6


class TrlLoop:
    """AdamW by TRL's trainer, as it comes: fused output layer, DAPO's loss."""

    def __init__(self, causal_lm: PreTrainedModel, *, rows: int = ROWS) -> None:
        # Imported here because it is no dependency.
        import pyarrow as pa  # type: ignore[import-not-found]
        from datasets import Dataset  # type: ignore[import-not-found]
        from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]

        class Trainer(GRPOTrainer):
            def _prepare_inputs(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
                return inputs

        def nothing(completions: list[str], **_: object) -> list[float]:
            return [0.0] * len(completions)

        config = GRPOConfig(
            output_dir=tempfile.mkdtemp(prefix="nyala-trl-"),
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=rows,
            learning_rate=LR,
            gradient_checkpointing=False,
            report_to="none",
            disable_tqdm=True,
        )
        self._trainer = Trainer(
            model=causal_lm,
            reward_funcs=nothing,
            args=config,
            train_dataset=Dataset(
                pa.Table.from_pylist([{"prompt": "1"}] * rows), fingerprint="nyala"
            ),
            processing_class=make_tokenizer([]),
        )
        self._trainer.create_optimizer()
        self._rows = rows

    def step(self, episodes: Sequence[Episode], advantages: Sequence[float]) -> None:
        """Train one batch."""
        trainer, optimizer, rows = self._trainer, self._trainer.optimizer, self._rows
        cuts = [range(n, min(n + rows, len(episodes))) for n in range(0, len(episodes), rows)]
        trainer.current_gradient_accumulation_steps = len(cuts)
        trained = torch.tensor(sum(len(e.completion.token_ids) for e in episodes))
        for cut in cuts:
            inputs = _padded([episodes[row] for row in cut], [advantages[row] for row in cut])
            inputs["num_items_in_batch"] = trained
            trainer.training_step(trainer.model, inputs, trained)
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def _padded(episodes: list[Episode], advantages: list[float]) -> dict[str, Any]:
    """Prompts padded on the left and completions on the right, as TRL's generation returns them."""
    prompts, prompt_mask = _rows([e.prompt_ids for e in episodes], on_left=True)
    completions, mask = _rows([e.completion.token_ids for e in episodes], on_left=False)
    behaviour, _ = _rows([e.completion.behaviour_logprobs for e in episodes], on_left=False)
    return {
        "prompt_ids": prompts.long(),
        "prompt_mask": prompt_mask,
        "completion_ids": completions.long(),
        "completion_mask": mask,
        "old_per_token_logps": behaviour,
        "advantages": torch.tensor(advantages),
    }


def _rows(rows: Sequence[np.ndarray], *, on_left: bool) -> tuple[Tensor, Tensor]:
    """The rows padded with zeros, and where they are not padded. Shapes [B, T] of either."""
    width = max(map(len, rows))
    padded_BT = np.zeros((len(rows), width), dtype=rows[0].dtype)
    mask_BT = np.zeros((len(rows), width), dtype=np.int64)
    for b, row in enumerate(rows):
        place = slice(width - len(row), width) if on_left else slice(0, len(row))
        padded_BT[b, place], mask_BT[b, place] = row, 1
    return torch.from_numpy(padded_BT), torch.from_numpy(mask_BT)
