"""Adapters beside whole weights on word problems: held-out answers of three seeds.

    python -m tests.system.adapters_learn MODEL --done FOLDER

Each run trains ten batches of 64 answers, adapters at ten times the rate. A run that FOLDER has is
not made again, and one that was ended goes on. The exit code is 1 where the two differ by more than
seeds of one of them do.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

RATE = 1e-5
ARMS = {
    "whole": (f"learner.lr={RATE}",),
    "adapters": (f"learner.lr={10 * RATE}", "learner.lora_rank=16"),
}
SEEDS = (0, 1, 2)
STEPS = 10
NUM_ROWS, NUM_HELD_OUT = 400, 64
TEMPLATES = (
    ("{a} birds sit on a roof and {b} more land there. How many birds sit there now?", "+"),
    ("A jar holds {a} beans, a bag holds {b}. How many beans are that together?", "+"),
    ("Of {c} candles {a} have burnt down. How many candles are left?", "-"),
    ("Kim had {c} stickers and gave {a} away. How many stickers does Kim still have?", "-"),
    ("A garden has {a} rows of {b} tulips each. How many tulips grow there?", "*"),
    ("A ticket costs {a} coins. How many coins do {b} tickets cost?", "*"),
)
COMMON = (
    "run.environment=dataset",
    "run.dtype=bfloat16",
    f"run.steps={STEPS}",
    "run.group_size=8",
    "run.groups_per_batch=8",
    "run.temperature=0.6",
    "run.max_policy_lag=2",
    "run.max_prompt_tokens=96",
    "run.max_completion_tokens=48",
    f"run.eval_every={STEPS}",
    f"run.eval_episodes={NUM_HELD_OUT}",
    "learner.checkpoint_every=2",
    "broker.endpoint=tcp://127.0.0.1:0",
)


def write_rows(path: Path, count: int, *, seed: int) -> None:
    """Write questions with their answers, a row each."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        template, kind = draw.choice(TEMPLATES)
        a, b = draw.randint(2, 12), draw.randint(2, 12)
        answer = {"+": a + b, "-": b, "*": a * b}[kind]
        question = template.format(a=a, b=b, c=a + b)
        rows.append(json.dumps({"question": question, "answer": str(answer)}))
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")


def settings_of(model: str, folder: Path, arm: str, seed: int) -> Sequence[str]:
    """List the settings of a run."""
    environment = {
        "path": str(folder / "rows.jsonl"),
        "held_out": str(folder / "held-out.jsonl"),
        "prompt": "question",
        "answer": "answer",
        "scorer": "numeric",
        "answer_format": "Answer with one number.",
    }
    own = (
        f"run.name={arm}-{seed}",
        f"run.directory={folder}",
        f"run.model={model}",
        f"run.seed={seed}",
        f"run.environment_settings={json.dumps(environment)}",
    )
    return (*own, *COMMON, *ARMS[arm])


def scores(folder: Path) -> dict[int, float]:
    """Read the held-out scores of a run by batch; of a run that has not begun there are none."""
    path = folder / "eval.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {line["step"]: line["score"] for line in map(json.loads, lines)}


def trained(model: str, folder: Path, arm: str, seed: int) -> dict[int, float]:
    """Train a run to its end, unless it has got there before; return its scores."""
    own = folder / f"{arm}-{seed}"
    if STEPS not in scores(own):
        given = [part for each in settings_of(model, folder, arm, seed) for part in ("--set", each)]
        code = "from console.main import app; app()"
        empty = folder / "empty.yaml"
        empty.write_text("{}\n")
        command = [sys.executable, "-c", code, "up", str(empty), "--plain", *given]
        subprocess.run(command, check=True)
    return scores(own)


def within_spread(ends: dict[str, list[float]]) -> bool:
    """Whether the arms' means differ by no more than seeds of one arm do."""
    spread = max(max(each) - min(each) for each in ends.values())
    whole, adapters = (mean(ends[arm]) for arm in ARMS)
    return abs(adapters - whole) <= spread


def main() -> int:
    """Print a row for each run, then the means."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder or hub name of a chat model")
    parser.add_argument("--done", type=Path, default=Path("runs/adapters-learn"))
    given = parser.parse_args()
    folder = given.done.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "rows.jsonl", NUM_ROWS, seed=0)
    write_rows(folder / "held-out.jsonl", NUM_HELD_OUT, seed=1)
    ends: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for seed in SEEDS:
        for arm, held_out in ends.items():
            found = trained(given.model, folder, arm, seed)
            held_out.append(found[STEPS])
            print(f"| {arm} | {seed} | {found[0]:.3f} | {found[STEPS]:.3f} |", flush=True)
    for arm, held_out in ends.items():
        print(f"| {arm} | mean | | {mean(held_out):.3f} |")
    return int(not within_spread(ends))


if __name__ == "__main__":
    raise SystemExit(main())
