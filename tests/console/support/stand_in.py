"""A stand-in for a role's process: speaks in log lines, obeys SIGTERM, and trains by counting.

`python -m tests.console.support.stand_in ROLE FOLDER STEPS [BEHAVIOUR]` suffices
for `nyala up`, which sees of a role only its log, its files and its exit code. A learner goes on
after its newest checkpoint.
"""

import json
import signal
import sys
import time
from pathlib import Path

LOADING_S = 0.5  # long enough for a stage to be seen
STEP_S = 0.05


def main():
    role, folder, steps, behaviour = *sys.argv[1:4], "".join(sys.argv[4:5])
    signal.signal(signal.SIGTERM, lambda *_: leave(role, Path(folder)))
    log(stage=f"importing as {role}")
    if behaviour == "refuses":
        log(event="run.reward must be good, got bad", level="error")
        sys.exit(2)
    if behaviour == "crashes once" and not (Path(folder) / "crashed").exists():
        (Path(folder) / "crashed").touch()
        log(event="out of luck", level="error")
        sys.exit(1)
    time.sleep(LOADING_S)
    if role == "learner":
        train(Path(folder), int(steps))
    while True:
        time.sleep(0.05)


def train(folder, steps):
    done = sorted(path.name for path in (folder / "checkpoints").glob("step-*"))
    first = int(done[-1].partition("-")[2]) if done else 0
    for step in range(first + 1, steps + 1):
        time.sleep(STEP_S)
        row = {
            "step": step,
            "wall_s": step * STEP_S,
            "reward_mean": step / steps,
            "completion_tokens": 100,
            "policy_lag_mean": 1.0,
            "wait_s": 0.01,
        }
        append(folder / "metrics.jsonl", row)
        append(folder / "eval.jsonl", {"step": step, "accuracy": step / steps})
        if step % 5 == 0:
            (folder / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
    summary = {"held_out_accuracy_before": 0.1, "held_out_accuracy_after": 0.9, "steps": steps}
    (folder / "summary.json").write_text(json.dumps(summary))
    sys.exit(0)


def leave(role, folder):
    append(folder / "ends.jsonl", {"role": role})
    sys.exit(0)


def log(**fields):
    print(json.dumps(fields), file=sys.stderr, flush=True)


def append(path, row):
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
