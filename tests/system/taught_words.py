"""Supervised training of a chat model on solved word problems, then training by reward.

    python -m tests.system.taught_words MODEL --done FOLDER

Three passes over 300 problems with a solution of one line, then ten batches of 64 answers. A run
that FOLDER has is not made again, and one that was ended goes on. The exit code is 1 where the
supervised model answers no more held-out questions than the one before, or the rewarded one fewer
than the supervised one by more than chance, or the report lacks one of the two curves.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path

from tests.system.adapters_learn import TEMPLATES, scores, write_rows

NUM_SOLVED, NUM_ROWS, NUM_HELD_OUT = 300, 400, 128
STEPS = 10
FORMAT = "Answer with one number."
CHANCE = 0.08  # twice the standard error of a difference of 128 answers each, half of them right
SIGNS = {"+": "{a} + {b} = {answer}", "-": "{c} - {a} = {answer}", "*": "{a} * {b} = {answer}"}
COMMON = (
    "run.environment=dataset",
    "run.group_size=8",
    "run.groups_per_batch=8",
    "run.temperature=0.8",
    "run.max_prompt_tokens=96",
    "run.max_completion_tokens=48",
    f"run.eval_episodes={NUM_HELD_OUT}",
    "learner.microbatch_tokens=2048",
    "learner.checkpoint_every=2",
    "broker.endpoint=tcp://127.0.0.1:0",
)
TAUGHT = (
    "sft.batch=30",
    "sft.held_out=30",
    "run.eval_every=9",
    "learner.lr=2e-5",
    "learner.lr_warmup_steps=3",
    "learner.lr_decay=linear",
)
REWARDED = (f"run.steps={STEPS}", f"run.eval_every={STEPS}", "learner.lr=1e-5")


def write_solved(path: Path, count: int, *, seed: int) -> None:
    """Write problems with a solution of one line, a row each."""
    draw, rows = random.Random(seed), []
    for _ in range(count):
        template, kind = draw.choice(TEMPLATES)
        a, b = draw.randint(2, 12), draw.randint(2, 12)
        numbers = {"a": a, "b": b, "c": a + b, "answer": {"+": a + b, "-": b, "*": a * b}[kind]}
        question = template.format(**numbers)
        solution = f"{SIGNS[kind].format(**numbers)}. The answer is {numbers['answer']}."
        rows.append(json.dumps({"prompt": f"{question}\n\n{FORMAT}", "completion": solution}))
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")


def nyala(
    folder: Path, verb: str, *arguments: str, name: str = "", own: tuple[str, ...] = ()
) -> str:
    """Call a verb, with the settings that both runs share where the run has a name."""
    environment = {
        "path": str(folder / "rows.jsonl"),
        "held_out": str(folder / "held-out.jsonl"),
        "prompt": "question",
        "answer": "answer",
        "scorer": "numeric",
        "answer_format": FORMAT,
    }
    settings = (
        f"run.name={name}",
        f"run.directory={folder}",
        f"run.environment_settings={json.dumps(environment)}",
        *COMMON,
        *own,
    )
    flags = [text for setting in settings if name for text in ("--set", setting)]
    code = "from console.main import app; app()"
    command = [sys.executable, "-c", code, verb, *arguments, *flags]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> int:
    """Print the held-out accuracy before, after supervised training, and after reward."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder or hub name of a chat model")
    parser.add_argument("--done", type=Path, default=Path("runs/taught-words"))
    parser.add_argument("--epochs", type=float, default=3.0)
    chosen = parser.parse_args()
    folder = chosen.done.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    empty = folder / "empty.yaml"
    empty.write_text("{}\n")
    write_solved(folder / "solved.jsonl", NUM_SOLVED, seed=2)
    write_rows(folder / "rows.jsonl", NUM_ROWS, seed=0)
    write_rows(folder / "held-out.jsonl", NUM_HELD_OUT, seed=1)
    base, taught = f"run.model={chosen.model}", f"run.model={folder / 'taught' / 'model'}"
    data = (f"sft.data={folder / 'solved.jsonl'}", f"sft.epochs={chosen.epochs}")
    nyala(folder, "sft", str(empty), "--plain", name="taught", own=(base, *TAUGHT, *data))
    if STEPS not in scores(folder / "rewarded"):
        nyala(folder, "up", str(empty), "--plain", name="rewarded", own=(taught, *REWARDED))
    asked = nyala(folder, "eval", chosen.model, str(empty), "--json", name="asked", own=(base,))
    before, after = json.loads(asked)["score"], scores(folder / "rewarded")
    print(f"| {before:.3f} | {after[0]:.3f} | {after[STEPS]:.3f} |")
    page = folder / "both.html"
    nyala(folder, "report", str(folder / "taught"), str(folder / "rewarded"), "-o", str(page))
    text = page.read_text(encoding="utf-8")
    has_both = "Supervised loss" in text and "Sampled reward" in text
    return int(not (has_both and after[0] > before and after[STEPS] > after[0] - CHANCE))


if __name__ == "__main__":
    raise SystemExit(main())
