"""`nyala eval`: a model on the held-out questions of a run, without training."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any, NamedTuple

import msgspec
import typer
from rich.console import Console

from actors.environments.registry import make_environment, naming
from actors.episodes.maker import EpisodeMaker
from actors.episodes.play import play_model
from configs.errors import RewardError, SettingsError
from configs.logging import quiet_libraries
from configs.settings import Settings
from console.command_line import AsJson, Overrides
from console.display.display import print_line
from console.run.checks.model import check_model
from console.run.run_folder import settings_of
from console.run.user_files import resolve, with_value
from console.samples.try_command import Checkpoint, ModelOfRun, model_of
from learner.data.curriculum import eval_task
from learner.data.grades import REWARD, common_title, metrics_of

from .env import judge, own_stdout, refuse_agents, started_model, trained_reward

app = typer.Typer(add_completion=False, rich_markup_mode=None)


class GradedAnswer(NamedTuple):
    """The greedy answer to a held-out question."""

    environment: str
    title: str
    """Title of the metric that judges it."""
    grade: float
    reward: float
    """Reward as it would be trained."""


@app.command("eval")
def evaluate(
    run: Annotated[
        Path, typer.Argument(metavar="RUN|FOLDER", help="A run, or a model with SETTINGS.")
    ],
    config: Annotated[
        Path | None,
        typer.Argument(metavar="[SETTINGS]", help="Settings for a model.", show_default=False),
    ] = None,
    overrides: Overrides = None,
    *,
    checkpoint: Checkpoint = None,
    as_json: AsJson = False,
) -> None:
    """Ask a model the held-out questions of a run, as its evaluations do, and train nothing.

    The model is a run's: its trained model, else its newest checkpoint, else the model that it
    begins with. Or it is any model's folder, followed by a settings file or a run. Answers are
    greedy, by the run's engine; `--set run.eval_episodes=500` asks more questions.

    Example: `nyala eval models/smollm2-135m mine.yaml`
    """
    quiet_libraries()
    settings = resolve(settings_of(run if config is None else config, overrides or []))
    refuse_agents(settings.run, "eval")
    if config is not None and checkpoint is not None:
        raise SettingsError(
            "--checkpoint must be of a run, got it with a model's folder; leave --checkpoint out"
        )
    if not settings.run.mixture.num_questions:
        raise SettingsError(
            "run.eval_episodes must be above 0 to ask held-out questions, got 0; add --set "
            "run.eval_episodes=64"
        )
    chosen = model_of(settings, checkpoint) if config is None else _model_in(run)
    with own_stdout(), chosen as model:
        answers = asyncio.run(_answers(with_value(settings, "run", "model", model.path)))
    result: dict[str, Any] = {"model": model.name, **_figures(answers)}
    if settings.run.environments:
        names = dict.fromkeys(answer.environment for answer in answers)
        result["environments"] = {
            name: _figures([answer for answer in answers if answer.environment == name])
            for name in names
        }
    if as_json:
        sys.stdout.write(json.dumps(result, indent=2) + "\n")
        return
    console = Console()
    _print(console, model.name, result)
    for name, figures in result.get("environments", {}).items():
        _print(console, f"  {name}", figures)


@contextmanager
def _model_in(folder: Path) -> Iterator[ModelOfRun]:
    """Yield the model in a folder, as `model_of` yields that of a run."""
    place = folder.expanduser()
    yield ModelOfRun(str(folder), str(place.resolve() if place.exists() else folder), 0)


async def _answers(settings: Settings) -> list[GradedAnswer]:
    """Answer all held-out questions, and grade them as the learner does."""
    check_model(settings.run)
    mixture, metrics = settings.run.mixture, metrics_of(settings.run, settings.rewards)
    numbers = [(mixture.held_out(number), number) for number in range(mixture.num_questions)]
    answers: list[GradedAnswer] = []
    async with started_model(settings) as model:
        for at, (name, run) in enumerate(settings.run.by_environment.items()):
            items = [(place.item, number) for place, number in numbers if place.environment == at]
            specs = [
                msgspec.structs.replace(eval_task(settings.run, number, number), index=item)
                for item, number in items
            ]
            limit_s = settings.actors.environment_timeout_s
            maker = EpisodeMaker(model.tokenizer, run, "eval", limit_s=limit_s)
            with naming(run):
                environment = make_environment(run)
                played = await play_model(model.engine, model.tokenizer, maker, environment, specs)
                judged = await judge(run, settings.actors, played)
            shown = []
            for episode, functions in zip(played, judged, strict=True):
                if isinstance(functions, RewardError):
                    raise functions
                shown.append(trained_reward(run, settings.rewards, episode, functions))
            metric = metrics[name].in_answers(parts for _, parts in shown)
            answers += [
                GradedAnswer(name, metric.title, metric.grade(reward, parts), reward)
                for reward, parts in shown
            ]
    return answers


def _figures(answers: list[GradedAnswer]) -> dict[str, Any]:
    grades, n = [answer.grade for answer in answers], len(answers)
    return {
        "metric": common_title(answer.title for answer in answers),
        "score": fmean(grades),
        "standard_error": stdev(grades) / n**0.5 if n > 1 else None,
        "n": n,
        REWARD: fmean(answer.reward for answer in answers),
    }


def _print(console: Console, name: str, figures: dict[str, Any]) -> None:
    error = figures["standard_error"]
    spread = "" if error is None else f" (standard error {error:.3f})"
    text = (
        f"{name}: held-out {figures['metric']} {figures['score']:.3f}{spread}, "
        f"{figures['n']} questions"
    )
    other = f", held-out reward {figures[REWARD]:.3f}" * (figures[REWARD] != figures["score"])
    print_line(console, text + other)
