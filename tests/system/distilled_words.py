"""On-policy distillation of a chat model on word problems, from a copy that a reward has taught.

    python -m tests.system.distilled_words MODEL --done FOLDER

The teacher is MODEL after 30 batches of 64 answers with their reward; its student is MODEL, and
gets 10 batches without one. A run that FOLDER has is not made again, and one that was ended goes
on. The exit code is 1 where the student has less than half of the teacher's gain.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from tests.system.adapters_learn import (
    COMMON,
    NUM_HELD_OUT,
    NUM_ROWS,
    RATE,
    scores,
    write_rows,
)

TEACHER_STEPS, STUDENT_STEPS = 30, 10
SHARE = 0.5
"""Of the teacher's gain, that its student has to have at least."""


def environment_of(folder: Path) -> str:
    """Write the settings of the environment, as JSON."""
    return json.dumps(
        {
            "path": str(folder / "rows.jsonl"),
            "held_out": str(folder / "held-out.jsonl"),
            "prompt": "question",
            "answer": "answer",
            "scorer": "numeric",
            "answer_format": "Answer with one number.",
        }
    )


def trained(model: str, folder: Path, name: str, steps: int, *flags: str) -> dict[int, float]:
    """Train a run to its end, unless it has got there before; return its scores by batch."""
    run = folder / name
    if steps not in scores(run):
        settings = (
            *COMMON,
            f"run.name={name}",
            f"run.directory={folder}",
            f"run.model={model}",
            f"run.environment_settings={environment_of(folder)}",
            f"run.steps={steps}",
            "run.eval_every=10",
            f"learner.lr={RATE}",
        )
        empty = folder / "empty.yaml"
        empty.write_text("{}\n")
        code = "from console.main import app; app()"
        changes = [part for each in settings for part in ("--set", each)]
        command = [sys.executable, "-c", code, "up", str(empty), "--plain", *changes, *flags]
        subprocess.run(command, check=True)
    return scores(run)


def main() -> int:
    """Print the scores of both, and judge the student's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder or hub name of a chat model")
    parser.add_argument("--done", type=Path, default=Path("runs/distilled-words"))
    given = parser.parse_args()
    folder = given.done.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "rows.jsonl", NUM_ROWS, seed=0)
    write_rows(folder / "held-out.jsonl", NUM_HELD_OUT, seed=1)
    taught = trained(given.model, folder, "teacher", TEACHER_STEPS)
    method = ("--method", "OPD", "--set", f"algorithm.teacher={folder / 'teacher' / 'model'}")
    learned = trained(given.model, folder, "student", STUDENT_STEPS, *method)
    gain, share = taught[TEACHER_STEPS] - taught[0], learned[STUDENT_STEPS] - learned[0]
    for name, found in (("teacher", taught), ("student", learned)):
        print(f"| {name} | {' | '.join(f'{found[step]:.3f}' for step in sorted(found))} |")
    print(f"the student has {share:+.3f} of the teacher's {gain:+.3f}")
    return int(gain <= 0 or share < SHARE * gain)


if __name__ == "__main__":
    raise SystemExit(main())
