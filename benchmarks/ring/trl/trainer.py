"""The TRL arm: its synchronous GRPO trainer on the same model, prompts and reward.

Runs in a process of its own and prints one JSON object last. Needs `trl`, which Nyala itself does
not. Float32, with transformers' generation, TRL's quickest form on a CPU, or with vLLM in its
process (`colocated.py`). Loss, clip bounds,
optimizer and learning rates are those of Nyala's defaults, which TRL calls `dapo`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from pathlib import Path
from typing import Any

from actors.environments.dataset.scorers import numeric, score_of
from actors.environments.final_answer import position_share

WARM_UP_STEPS = 2  # the first steps compile kernels and fill caches


def letters(text: str, right: str) -> float:
    """Score as the demo does: letters in their place, and all of them."""
    return float(position_share(text, right) + (text == right)) / 2


def number(text: str, right: str) -> float:
    """Score as a dataset's `numeric` does."""
    return score_of(text, right, numeric) or 0.0


SCORERS = {"letters": letters, "numeric": number}


def main() -> None:
    """Train for a number of steps and report trained tokens, CPU seconds and wall seconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="Hugging Face model directory")
    parser.add_argument("--prompts", required=True, help="JSON lines of {prompt, answer}")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64, help="completions per step")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--is-chat", type=int, default=0, help="1: prompts are a user's turns")
    parser.add_argument("--scorer", choices=SCORERS, default="letters")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--lr-warmup-steps", type=int, default=0)
    parser.add_argument("--adam-beta2", type=float, default=0.999)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--held-out", type=Path, help="as --prompts, to evaluate")
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--eval-every", type=int, default=10, help="steps")
    args = parser.parse_args()
    print(json.dumps(train(args)))


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Run TRL's trainer and measure the steps after the warm-up, and what it learns."""
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    # Imported here because the thread count must be in the environment first.
    import pyarrow as pa  # type: ignore[import-not-found]
    import torch
    from datasets import Dataset  # type: ignore[import-not-found]
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]

    from benchmarks.ring.trl import colocated

    torch.set_num_threads(args.threads)
    uses_vllm = args.engine == "vllm"
    if uses_vllm:
        colocated.prepare()
    rows = read_rows(Path(args.prompts), is_chat=bool(args.is_chat))
    held_out = read_rows(args.held_out, is_chat=bool(args.is_chat)) if args.held_out else []
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    answers = [row["answer"] for row in held_out]
    evaluations: list[dict[str, float]] = []
    tokens = 0
    marks: list[tuple[float, float, int]] = []

    score = SCORERS[args.scorer]

    def rewards(
        prompts: list[Any],  # noqa: ARG001 - TRL's contract
        completions: list[Any],
        completion_ids: list[list[int]],
        answer: list[str],
        **_: object,
    ) -> list[float]:
        nonlocal tokens
        tokens += sum(len(ids) for ids in completion_ids)
        texts = [_text(completion) for completion in completions]
        return [score(text, right) for text, right in zip(texts, answer, strict=True)]

    class Marks(TrainerCallback):
        def on_train_begin(self, *_: object, **kwargs: Any) -> None:
            self._evaluate(0, kwargs["model"])

        def on_step_end(self, _: object, state: Any, *__: object, **kwargs: Any) -> None:
            usage = resource.getrusage(resource.RUSAGE_SELF)
            marks.append((time.monotonic(), usage.ru_utime + usage.ru_stime, tokens))
            if state.global_step % args.eval_every == 0:
                self._evaluate(state.global_step, kwargs["model"])

        def _evaluate(self, step: int, model: Any) -> None:
            if held_out:
                began = time.time()
                texts = greedy_answers(model, tokenizer, held_out, args.max_tokens)
                right = [score(*each) == 1.0 for each in zip(texts, answers, strict=True)]
                share = sum(right) / len(right)
                took = time.time() - began
                found = {"step": step, "time": began, "took_s": took, "accuracy": share}
                evaluations.append(found)

    config = GRPOConfig(
        output_dir="/tmp/nyala-trl-arm",  # noqa: S108 - nothing is saved there
        use_cpu=True,
        bf16=False,
        max_steps=args.steps + WARM_UP_STEPS,
        per_device_train_batch_size=args.batch,
        num_generations=args.group_size,
        max_completion_length=args.max_tokens,
        learning_rate=args.lr,
        lr_scheduler_type="polynomial",
        lr_scheduler_kwargs={"lr_end": args.lr / 10, "power": 1.0},
        warmup_steps=args.lr_warmup_steps,
        adam_beta2=args.adam_beta2,
        weight_decay=0.0,
        max_grad_norm=1.0,
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        beta=0.0,
        temperature=args.temperature,
        shuffle_dataset=False,
        seed=args.seed,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=1000,
        gradient_checkpointing=False,
        **(colocated.SETTINGS if uses_vllm else {}),
    )
    trainer = GRPOTrainer(
        model=args.model,
        reward_funcs=rewards,
        args=config,
        train_dataset=Dataset(pa.Table.from_pylist(rows), fingerprint="nyala"),
        processing_class=tokenizer,
        callbacks=[Marks()],
    )
    if uses_vllm:
        colocated.reload_by_layers(trainer)
    trainer.train()
    (t0, cpu0, n0), (t1, cpu1, n1) = marks[WARM_UP_STEPS - 1], marks[-1]
    return {
        "trained_tokens": n1 - n0,
        "wall_s": t1 - t0,
        "cpu_s": cpu1 - cpu0,
        "tokens_per_cpu_s": (n1 - n0) / (cpu1 - cpu0),
        "tokens_per_s": (n1 - n0) / (t1 - t0),
        "steps_per_s": (len(marks) - WARM_UP_STEPS) / (t1 - t0),
        "evaluations": evaluations,
    }


def read_rows(path: Path, *, is_chat: bool) -> list[dict[str, Any]]:
    """Return prompts and answers of a file."""
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    pairs = [(line["prompt"], line["answer"]) for line in lines]
    return [
        {"prompt": _turns(prompt) if is_chat else prompt, "answer": answer}
        for prompt, answer in pairs
    ]


def _turns(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else str(completion[0]["content"])


def greedy_answers(
    model: Any, tokenizer: Any, rows: list[dict[str, Any]], max_tokens: int
) -> list[str]:
    """Return an answer to each row, the most probable token each time."""
    import torch

    prompts = [row["prompt"] for row in rows]
    if is_chat := not isinstance(prompts[0], str):
        prompts = tokenizer.apply_chat_template(prompts, tokenize=False, add_generation_prompt=True)
    given = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=not is_chat)
    model.eval()
    with torch.no_grad():
        ids = model.generate(**given, max_new_tokens=max_tokens, do_sample=False)
    model.train()
    made = ids[:, given.input_ids.shape[1] :]
    return list(tokenizer.batch_decode(made, skip_special_tokens=True))


if __name__ == "__main__":
    main()
