"""A run's folder, made of the files that a learner and a broker write."""

import json

from configs.loader import save
from configs.settings import Settings
from learner.reporting.samples import SampleFiles, SampleLine, SampleTurn, encoded

BEGAN = 1_800_000_000.0
BATCH_S = 2.0


def made_run(folder, *, steps=4, name=None, metrics=None, learner=None, **run):
    """Write settings and metrics of a run; `metrics` gives the figures of a batch other values."""
    folder.mkdir(parents=True)
    table = {"name": name or folder.name, "directory": folder.parent, "model": "init", **run}
    settings = Settings.model_validate({"run": table, "learner": learner or {}})
    save(settings, folder / "config.yaml")
    rows = [metrics_row(step, **(metrics(step) if metrics else {})) for step in range(1, steps + 1)]
    write_lines(folder / "metrics.jsonl", rows)
    return folder


def metrics_row(step, **figures):
    return {
        "step": step,
        "lineage": 1,
        "time": BEGAN + BATCH_S * step,
        "wall_s": BATCH_S * step,
        "reward_mean": step / 7,
        "loss": -1 / (step + 2),
        "entropy": 1 / step,
        "grad_norm": 2 + 1 / 3**step,
        "learning_rate": 1e-6 / step,
        "kl_pi_mu_k3": 0.001 * step,
        "kl_pi_ref_k3": None,
        "effective_sample_size": 1 - 0.01 * step,
        "sequence_effective_sample_size": 1 - 0.02 * step,
        "clip_fraction_low": 0.1 / step,
        "clip_fraction_high": 0.2 / step,
        "policy_lag_mean": 0.5,
        "policy_lag_max": 2,
        "policy_lag_histogram": {"0": 50, "2": 150},
        "ratio_percentiles": {str(p): 1 + (p - 50) / 1000 for p in (1, 5, 25, 50, 75, 95, 99)},
        "log_ratio_histogram": {"-0.1": 30, "0": 190 - 20 * step, "0.03": 20 * step - 20},
        "response_length_mean": 6.5,
        "response_length_max": 9,
        "response_truncated_fraction": 0.0,
        "zero_variance_groups": 1,
        "groups": 4,
        "completion_tokens": 300,
        "reused_tokens": 0,
        "episodes_by_actor": {"actor-0-aa": 8},
        "alerts": [],
        "wait_s": 0.2,
        "forward_s": 0.8,
        "backward_s": 1.0,
        **figures,
    }


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def answers(folder, *, step, grades, text="an answer", **fields):
    """Keep greedy answers to held-out questions, `grades` by question, and their evaluation."""
    lines = [answer(step, question, grade, text, **fields) for question, grade in grades.items()]
    SampleFiles(folder, max_bytes=2**26).append(encoded(lines))
    accuracy = sum(grades.values()) / len(grades)
    row = {"step": step, "accuracy": accuracy, "reward": accuracy, "environments": {}}
    write_lines(folder / "eval.jsonl", [row])


def answer(step, question, grade, text, **fields):
    usual = {
        "step": step,
        "lineage": 1,
        "kind": "eval",
        "environment": "spell",
        "sample": 0,
        "group": 0,
        "task": 0,
        "question": question,
        "prompt": f"spell {question}",
        "turns": [SampleTurn("policy", text, 3)],
        "reward": grade / 2,
        "parts": {"exact": grade},
        "metrics": {},
        "finish": "stop",
        "actor": "actor-0-aa",
        "versions": [(1, step, 0)],
        "logprobs": "ALgAuAC4",
        "trained_tokens": 3,
        "started": BEGAN,
        "finished": BEGAN + 1,
        "notes": {},
    }
    return SampleLine(**{**usual, **fields})
