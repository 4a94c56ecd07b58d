"""The workload of the arms: presets with overrides, the model they share, and its prompts."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.support.machine import REPOSITORY
from configs.loader import load
from configs.settings import Settings
from console.run.init_model import make_if_needed, stamp
from console.run.user_files import resolve

LONG_WORDS = (
    "{dataset: spell_backward, prompt_style: compact, "
    "min_word_len: 10, max_word_len: 14, dense: true}"
)
THROUGHPUT = (
    f"run.environment_settings={LONG_WORDS}",
    "run.max_completion_tokens=32",
    "run.group_size=8",
    "run.groups_per_batch=8",
    "run.steps=100000",  # we stop it
    "run.eval_episodes=0",
    "actors.count=1",
    "actors.max_concurrent_episodes=256",  # of a model this small a step costs what few cost
    "learner.init_layers=4",
    "learner.warm_start_steps=0",
    "learner.lr=1e-9",  # as good as none: completions keep their length
    "learner.lr_warmup_steps=0",
    "algorithm.entropy_bonus=0.0",
    "learner.checkpoint_every=50",
)
"""Over the demo's preset: 64 completions of at most 32 tokens per batch, a random 4x128 model."""

LONGER = ("run.max_completion_tokens=128",)
"""Over `THROUGHPUT`: the same model may then write four times as much."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Settings of one arm's run."""

    name: str
    preset: str
    folder: Path
    """Where runs and the shared model are kept."""
    overrides: tuple[str, ...] = ()
    model: Path | None = field(default=None)

    @property
    def config(self) -> Path:
        """The preset's file."""
        return REPOSITORY / "configs" / self.preset

    @property
    def flags(self) -> list[str]:
        """All overrides, as `nyala up` takes them."""
        own = [f"run.name={self.name}", f"run.directory={self.folder}"]
        model = [f"run.model={self.model}"] if self.model else []
        return [*self.overrides, *own, *model]

    def settings(self) -> Settings:
        """Load them."""
        return resolve(load(self.config, self.flags))


def environment() -> dict[str, str]:
    """Return the environment of our processes: this checkout's code, one thread each."""
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def make_model(workload: Workload) -> Path:
    """Make the model of a workload beside its runs, unless it is there: runs share it."""
    from rich.console import Console

    settings = workload.settings()
    target = workload.folder / "models" / stamp(settings)[:12]
    make_if_needed(settings, target, Console(stderr=True, quiet=True), plain=True)
    return target


def write_prompts(workload: Workload, count: int) -> Path:
    """Write the first prompts of the training curriculum with their answers, for other trainers."""
    return _write_questions(workload, "prompts", count, held_out=False)


def write_held_out(workload: Workload, count: int) -> Path:
    """Write the first held-out questions with their answers, which runs evaluate by."""
    return _write_questions(workload, "held-out", count, held_out=True)


def _write_questions(workload: Workload, name: str, count: int, *, held_out: bool) -> Path:
    from actors.environments.calls import call, drive
    from actors.environments.registry import make_environment

    run = workload.settings().run
    (settings,) = run.by_environment.values()
    environment = make_environment(settings)
    path = workload.folder / f"{workload.name}-{name}.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for item in range(count):
            asked = drive(call(environment.begin, item, run.seed, held_out=held_out, limit_s=60.0))
            line = {"prompt": asked.prompt, "answer": asked.answer}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    return path
