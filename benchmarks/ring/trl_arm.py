"""The TRL arm: its synchronous GRPO trainer on the same model, prompts and reward.

Runs in a process of its own and prints one JSON object last. Needs `trl`, which Nyala itself does
not. With transformers' generation and float32: TRL's quickest form on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from pathlib import Path

WARM_UP_STEPS = 2  # the first steps compile kernels and fill caches


def main() -> None:
    """Train for a number of steps and report trained tokens, CPU seconds and wall seconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="Hugging Face model directory")
    parser.add_argument("--prompts", required=True, help="JSON lines of {prompt, answer}")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64, help="completions per step")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    print(json.dumps(train(args)))


def train(args: argparse.Namespace) -> dict[str, float]:
    """Run TRL's trainer and measure the steps after the warm-up."""
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    # Imported here because the thread count must be in the environment first.
    import pyarrow as pa  # type: ignore[import-not-found]
    import torch
    from datasets import Dataset  # type: ignore[import-not-found]
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]

    torch.set_num_threads(args.threads)
    lines = Path(args.prompts).read_text(encoding="utf-8").splitlines()
    rows = [{key: json.loads(line)[key] for key in ("prompt", "answer")} for line in lines]
    tokens = 0
    marks: list[tuple[float, float, int]] = []

    def positions(
        prompts: list[str],  # noqa: ARG001 - TRL's contract
        completions: list[str],
        completion_ids: list[list[int]],
        answer: list[str],
        **_: object,
    ) -> list[float]:
        nonlocal tokens
        tokens += sum(len(ids) for ids in completion_ids)
        return [
            sum(a == b for a, b in zip(c, t, strict=False)) / max(len(c), len(t), 1)
            for c, t in zip(completions, answer, strict=True)
        ]

    class Marks(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            usage = resource.getrusage(resource.RUSAGE_SELF)
            marks.append((time.monotonic(), usage.ru_utime + usage.ru_stime, tokens))

    config = GRPOConfig(
        output_dir="/tmp/nyala-trl-arm",  # noqa: S108 - nothing is saved there
        use_cpu=True,
        bf16=False,
        max_steps=args.steps + WARM_UP_STEPS,
        per_device_train_batch_size=args.batch,
        num_generations=args.group_size,
        max_completion_length=args.max_tokens,
        learning_rate=args.lr,
        beta=0.0,
        temperature=1.0,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=1000,
        gradient_checkpointing=False,
    )
    trainer = GRPOTrainer(
        model=args.model,
        reward_funcs=positions,
        args=config,
        train_dataset=Dataset(pa.Table.from_pylist(rows), fingerprint="nyala"),
        processing_class=AutoTokenizer.from_pretrained(args.model, padding_side="left"),
        callbacks=[Marks()],
    )
    trainer.train()
    (t0, cpu0, n0), (t1, cpu1, n1) = marks[WARM_UP_STEPS - 1], marks[-1]
    return {
        "trained_tokens": n1 - n0,
        "wall_s": t1 - t0,
        "cpu_s": cpu1 - cpu0,
        "tokens_per_cpu_s": (n1 - n0) / (cpu1 - cpu0),
        "tokens_per_s": (n1 - n0) / (t1 - t0),
        "steps_per_s": (len(marks) - WARM_UP_STEPS) / (t1 - t0),
    }


if __name__ == "__main__":
    main()
