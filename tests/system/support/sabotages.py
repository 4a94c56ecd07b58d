"""Runs that cannot learn, each for one reason, and the rule that is to name it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.system.support.live_run import REPOSITORY, LiveRun

SIZE = (
    "run.steps=24",
    "run.group_size=8",
    "run.groups_per_batch=8",
    "run.eval_every=0",
    "run.eval_episodes=0",
    "learner.lr=3e-4",
    "learner.init_layers=2",
    "learner.warm_start_steps=200",
    "learner.warm_start_batch=128",
    "learner.warm_start_lr=3e-3",
    "learner.warm_start_echo=0.5",
    "learner.checkpoint_every=24",
    "actors.engine=torch",
)
"""The tiny preset with enough answers to judge, from a model that knows how to spell."""

ZERO = "def judge(completions, **_):\n    return [0.0] * len(completions)\n"

RAISES = """
import random

def judge(completion, answer, environment_reward):
    if completion != answer and random.random() < 0.5:
        raise KeyError("answer")
    return environment_reward
"""

NEVER_JUDGES = """
def judge(completion, answer, environment_reward):
    if completion != answer:
        raise KeyError("answer")
    return environment_reward
"""

ONE_BROKEN = """
import os
from pathlib import Path

def judge(completion, environment_reward):
    mine = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().split(b"\\0")
    return 0.0 if b"actor-1" in mine else environment_reward
"""

Prepare = Callable[[Path], Sequence[str]]
"""Writes what a run needs into a folder, and returns its overrides."""


@dataclass(frozen=True, slots=True)
class Sabotage:
    """One fault."""

    name: str
    rule: str
    """That is to be the first advice."""
    named: str
    """A part of its text."""
    prepare: Prepare


def overrides(*given: str) -> Prepare:
    """Set settings alone."""
    return lambda _: given


def reward(source: str, *more: str) -> Prepare:
    """Judge by a function of one's own."""

    def prepare(folder: Path) -> Sequence[str]:
        (folder / "grading.py").write_text(source)
        return (f"run.reward={folder}/grading.py:judge", *more)

    return prepare


def numbers(folder: Path) -> Sequence[str]:
    """Ask for numbers a model that answers with letters."""
    rows = [
        {"question": f"{a}{b}c>", "answer": "31415"} for a in "abcdefghij" for b in "klmnopqrst"
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "path": f"{folder}/rows.jsonl",
        "prompt": "question",
        "answer": "answer",
        "scorer": "numeric",
        "answer_format": "",
    }
    return (
        "run.environment=dataset",
        f"run.environment_settings={json.dumps(settings)}",
        f"run.model={made_model(folder)}",
    )


def other_end_token(folder: Path) -> Sequence[str]:
    """Mistake another token for the one that ends a sequence."""
    model = made_model(folder)
    _change(model / "tokenizer_config.json", eos_token="<pad>")
    _change(model / "generation_config.json", eos_token_id=0)
    _change(model / "config.json", eos_token_id=0)
    return (f"run.model={model}",)


def no_generation_prompt(folder: Path) -> Sequence[str]:
    """Take a chat template that never says whose turn it is."""
    model = made_model(folder)
    template = "{% for m in messages %}{{ m['content'] }}<eos>{% endfor %}"
    _change(model / "tokenizer_config.json", chat_template=template)
    return (f"run.model={model}",)


def made_model(folder: Path) -> Path:
    """Make the model that the other runs begin with, as a folder that may be changed."""
    settings = [f"--set={each}" for each in (f"run.directory={folder}/made", *SIZE)]
    command = [sys.executable, "-c", "from console.main import app; app()", "init-model"]
    subprocess.run(
        [*command, str(REPOSITORY / "configs" / "tiny.yaml"), *settings],
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
        timeout=300,
    )
    return Path(shutil.copytree(folder / "made" / "tiny" / "init", folder / "model"))


SABOTAGES = (
    Sabotage("stop token", "stop_token_ignored", "<eos>", other_end_token),
    Sabotage("reward zero", "reward_constant", "grading.py:judge", reward(ZERO)),
    Sabotage("answers of another form", "answers_not_read", "(now numeric)", numbers),
    Sabotage(
        "temperature", "temperature_low", "temperature 0.01", overrides("run.temperature=0.01")
    ),
    Sabotage(
        "learning rate", "learning_rate_high", "learner.lr (now 0.03)", overrides("learner.lr=3e-2")
    ),
    Sabotage("template", "prompt_left_open", "has no generation prompt", no_generation_prompt),
    Sabotage(
        "broken actor", "actor_unlike_others", "actor-1", reward(ONE_BROKEN, "actors.count=2")
    ),
    Sabotage(
        "completion limit",
        "answers_cut_off",
        "run.max_completion_tokens (now 2)",
        overrides("run.max_completion_tokens=2"),
    ),
    Sabotage("reward raises", "reward_failing", "grading.py:6", reward(RAISES)),
    Sabotage(
        "reward never judges",
        "leasing_paused",
        "grading.py:4",
        reward(NEVER_JUDGES, "learner.warm_start_steps=1"),
    ),
    Sabotage("stop string", "stop_string_early", "'e' of run.stop", overrides('run.stop=["e"]')),
    Sabotage(
        "clip bounds",
        "clip_bounds_odd",
        "algorithm.clip_low (now 0.0001)",
        overrides("algorithm.clip_low=1e-4", "algorithm.clip_high=1e-4"),
    ),
)


@dataclass(frozen=True, slots=True)
class Advised:
    """What a run advised."""

    first: Counter[str]
    """Rule -> batches after which it was the first advice."""
    texts: dict[str, str]
    """Rule -> its newest text."""
    status: str
    """What `nyala status` said when the run was over or paused."""


def advised(folder: Path, *given: str) -> Advised:
    """Make a run, to its end or until too many of its tasks have died, and read its advice."""
    run = LiveRun(folder, "tiny.yaml", *SIZE, *given)
    learner = run.folder / "logs" / "learner.log"

    def is_over() -> bool:
        is_paused = learner.exists() and '"leasing_paused"' in learner.read_text()
        return is_paused or process.poll() is not None

    with run.up() as process:
        run.wait_until(is_over, "the run ends, or is paused")
        status = run.ask("status", str(run.folder))
    lines: list[list[dict[str, Any]]] = [line["advice"] for line in run.lines("metrics")]
    if not lines:  # nothing was trained: the learner's log alone has advice
        rows = map(json.loads, learner.read_text().splitlines())
        lines = [[row] for row in rows if row.get("event") == "ADVICE"]
    assert lines, run.logs()
    return Advised(
        first=Counter(line[0]["rule"] for line in lines if line),
        texts={each["rule"]: each["text"] for line in lines for each in line},
        status=status,
    )


def _change(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
