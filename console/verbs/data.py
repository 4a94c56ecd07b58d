"""`nyala data`: a look at a dataset before a run is trained on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated

import typer

from actors.chat import Message, Prompt, text_of
from actors.engine.tokenizer import ModelTokenizer
from actors.environments.dataset.environment import Dataset
from actors.environments.dataset.examination import Finding, examine
from actors.environments.registry import make_dataset, naming
from actors.rewards.functions import RewardSample
from actors.rewards.pool import RewardPool
from configs.errors import RewardError, SettingsError
from configs.loader import load
from configs.settings import ActorSettings, RunSettings
from console.arguments import AsJson, Config, ConfigOption, Overrides, one_of

from .tables import Facts, print_facts

SAMPLES = 8  # that reward functions judge

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Look at a dataset before a run is trained on it.\n\n"
    "Example: `nyala data check mine.yaml`",
)


@app.callback()
def _group() -> None:
    """Keep `check` a word of its own, although it is the only one."""


@app.command()
def check(
    config: Config = None,
    config_option: ConfigOption = None,
    overrides: Overrides = None,
    rows: Annotated[int, typer.Option(min=1, help="Rows to look at.")] = 10_000,
    as_json: AsJson = False,
) -> None:
    """Count rows, tokens and repeated questions; score right answers and empty ones.

    Starts no engine and trains nothing. Every row is read once, so a bad one is named.

    Example: `nyala data check mine.yaml`
    """
    settings = load(one_of(config, config_option), overrides or ())
    environments = settings.run.by_environment.items()
    found = []
    for name, run in environments:
        if run.environment == "dataset":
            with naming(run):
                title = f"{run.environment_settings.get('path')}, as {run.name} would train on it"
                own = {"environment": name} if len(environments) > 1 else {}
                rows_found = [own | each._asdict() for each in _examine(run, settings.actors, rows)]
                found.append(Facts(title, rows_found))
    if not found:
        names = ", ".join(run.environment for _, run in environments)
        raise SettingsError(
            f"run.environment must be dataset, got {names}; only rows of a file can be counted"
        )
    if as_json:
        print_facts(Facts("", [row for facts in found for row in facts.rows]), as_json=True)
        return
    for facts in found:
        print_facts(facts, as_json=False)


def _examine(run: RunSettings, actors: ActorSettings, rows: int) -> list[Finding]:
    """Look at the dataset of a run that has one environment."""
    dataset = make_dataset(run)
    findings = list(examine(dataset, run, tokens=_counter(run), rows=rows))
    return findings + (asyncio.run(_rewards(dataset, run, actors)) if run.reward else [])


def _counter(run: RunSettings) -> Callable[[Prompt], int]:
    if run.model == "init":  # one character is one token
        return lambda prompt: len(text_of(prompt))
    tokenizer = ModelTokenizer.of(run)
    return lambda prompt: len(tokenizer.encode_prompt(prompt))


async def _rewards(dataset: Dataset, run: RunSettings, actors: ActorSettings) -> list[Finding]:
    """Let reward functions judge right answers, where there are any, and empty ones."""
    items = [dataset.begin(index, 0, held_out=not run.is_trained) for index in range(SAMPLES)]
    pool = RewardPool(run, actors)
    found = []
    try:
        await pool.try_out(items[0])
        for what in ("right", "empty"):
            said = [(item.answer or "") if what == "right" else "" for item in items]
            samples = [
                RewardSample.of(item, [Message("assistant", text)], index=index)
                for index, (item, text) in enumerate(zip(items, said, strict=True))
            ]
            found.append(_judged(what, await pool.score(samples)))
    finally:
        await pool.close()
    return found


def _judged(what: str, results: list[dict[str, float] | RewardError]) -> Finding:
    given = [result for result in results if not isinstance(result, RewardError)]
    failed = [result for result in results if isinstance(result, RewardError)]
    means = {
        name: sum(parts.get(name, 0.0) for parts in given) / len(given)
        for name in sorted({name for parts in given for name in parts})
    }
    found = ", ".join(f"{name} {mean:.3f}" for name, mean in means.items()) or "none"
    advice = f"{len(failed)} of {len(results)} failed: {failed[0]}" if failed else ""
    return Finding(f"reward of {len(results)} {what} answers", found, advice)
