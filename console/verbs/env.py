"""`nyala env`: a few episodes of an environment, played for a person to look at."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, redirect_stdout
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console

from actors.chat import text_of
from actors.engine.engine import Engine
from actors.engine.tokenizer import ModelTokenizer
from actors.engine_of_settings import make_engine
from actors.environments.registry import make_environment, naming
from actors.episodes.maker import EpisodeError, EpisodeMaker
from actors.episodes.play import PlayedEpisode, echo, follow_script, play, play_model
from actors.rewards.pool import Parts, RewardPool
from broker.protocol.messages import Lease, TaskSpec
from configs.errors import DeadlineError, RewardError, SettingsError
from configs.loader import load
from configs.logging import quiet_libraries
from configs.settings import ActorSettings, RewardSettings, RunSettings, Settings
from console.command_line import AsJson, Config, ConfigOption, Overrides, one_of
from console.display.display import print_line
from console.run.run_folder import RunFolder
from learner.data.records import shaped

from .tables import ResultTable, print_facts

LONGEST_S = 1800.0  # all episodes of the model, its loading included
SEED = 0

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Play a few episodes of an environment.\n\nExample: `nyala env test mine.yaml`",
)


class PolicyKind(StrEnum):
    """The policy that plays the episodes."""

    SCRIPT = "script"
    ECHO = "echo"
    MODEL = "model"


@dataclass(frozen=True, slots=True)
class Shown:
    """An episode, its policy, and what the reward functions of the run give for it."""

    environment: str
    policy: PolicyKind
    played: PlayedEpisode
    rewards: Parts | RewardError
    reward: float | None
    """Reward that would be trained; None = a function failed."""


class LoadedModel(NamedTuple):
    """The model of a run, ready to play."""

    engine: Engine
    tokenizer: ModelTokenizer


@app.callback()
def _group() -> None:
    """Keep `test` a word of its own, although it is the only command."""


@app.command("test")
def show(
    config: Config = None,
    config_option: ConfigOption = None,
    overrides: Overrides = None,
    *,
    episodes: Annotated[
        int,
        typer.Option("-n", min=1, max=1000, help="Episodes of each policy in each environment."),
    ] = 3,
    policy: Annotated[
        list[PolicyKind] | None,
        typer.Option(help="Policy that plays; may be given several times. Default: all three."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Play episodes along the demonstration, by an echo and by the model, and print them.

    Shows what was said, the rewards, and of the model's episodes which tokens would be trained.
    Nothing is kept. A model that `init` stands for must have been made. All episodes of the model
    have half an hour.

    Example: `nyala env test mine.yaml --policy script --policy echo`
    """
    settings = load(one_of(config, config_option), overrides or ())
    refuse_agents(settings.run, "env test")
    policies = policy or list(PolicyKind)
    quiet_libraries()
    with own_stdout():
        shown = asyncio.run(_play_all(settings, policies, episodes))
    if as_json:
        print_facts(ResultTable("", [_as_json(episode) for episode in shown]), as_json=True)
        return
    console = Console()
    for episode in shown:
        _print(console, episode, of=f" of {episode.environment}" * bool(settings.run.environments))


def refuse_agents(run: RunSettings, verb: str) -> None:
    """Refuse a run whose conversations live agents hold: there is no host here.

    Raises:
        SettingsError: An environment of the run is `agent`.
    """
    if run.has_agents:
        raise SettingsError(
            f"run.environment must be one that is played without live agents for `nyala {verb}`, "
            f"got agent; train a few batches, `nyala up SETTINGS --set run.steps=3`, and look at "
            f"`nyala samples` and the held-out score in eval.jsonl"
        )


async def _play_all(settings: Settings, policies: Sequence[PolicyKind], n: int) -> list[Shown]:
    if PolicyKind.MODEL in policies:
        _check_model(settings.run)
        for run in settings.run.by_environment.values():
            with naming(run):
                await _check_prompts(run, settings.actors, n)
        limit = asyncio.timeout(LONGEST_S)
        try:
            async with limit, started_model(settings) as model:
                return await _play_each(settings, policies, n, model)
        except TimeoutError:
            if not limit.expired():
                raise
            raise DeadlineError(
                f"episodes of the model must end within {LONGEST_S:g} s, got some unfinished; "
                f"play fewer with -n, or leave the model out with --policy script --policy echo"
            ) from None
    return await _play_each(settings, policies, n, None)


async def _play_each(
    settings: Settings, policies: Sequence[PolicyKind], n: int, model: LoadedModel | None
) -> list[Shown]:
    """Play each environment of a run, and judge its episodes."""
    shown: list[Shown] = []
    for name, run in settings.run.by_environment.items():
        with naming(run):
            played = await _play_one(run, settings.actors, policies, n, model)
            rewards = await judge(run, settings.actors, [episode for _, episode in played])
        shown += [
            Shown(
                name,
                policy,
                episode,
                reward,
                _reward_of(run, settings.rewards, episode, reward),
            )
            for (policy, episode), reward in zip(played, rewards, strict=True)
        ]
    return shown


def _reward_of(
    run: RunSettings, rewards: RewardSettings, played: PlayedEpisode, parts: Parts | RewardError
) -> float | None:
    if isinstance(parts, RewardError):
        return None
    return trained_reward(run, rewards, played, parts)[0]


def trained_reward(
    run: RunSettings, rewards: RewardSettings, played: PlayedEpisode, parts: Parts
) -> tuple[float, Parts]:
    """Weigh the parts of an episode's reward as the learner does; return it and the parts."""
    score = played.score.judged(parts) if parts else played.score
    tokens = played.tokens, run.max_completion_tokens
    return shaped(score.reward, score.parts, rewards, tokens=tokens)


async def _play_one(
    run: RunSettings,
    actors: ActorSettings,
    policies: Sequence[PolicyKind],
    n: int,
    model: LoadedModel | None,
) -> list[tuple[PolicyKind, PlayedEpisode]]:
    """Let each of the policies play an environment."""
    environment = make_environment(run)
    specs, limit_s = _specs(run, n), actors.environment_timeout_s
    played: list[tuple[PolicyKind, PlayedEpisode]] = []
    for policy, speak in ((PolicyKind.SCRIPT, follow_script), (PolicyKind.ECHO, echo)):
        if policy in policies:
            episodes = [await play(environment, spec, speak, limit_s=limit_s) for spec in specs]
            played += [(policy, episode) for episode in episodes]
    if model is not None:
        maker = EpisodeMaker(model.tokenizer, run, "env-test", limit_s=limit_s)
        episodes = await play_model(model.engine, model.tokenizer, maker, environment, specs)
        played += [(PolicyKind.MODEL, episode) for episode in episodes]
    return played


def _check_model(run: RunSettings) -> None:
    if run.model == "init" and not (RunFolder(run.folder).init / "config.json").exists():
        raise SettingsError(
            f"run.model must have been made to play, got init and no {run.model_path}; make it "
            f"with `nyala init-model`, or leave it out with --policy script --policy echo"
        )


def _specs(run: RunSettings, n: int) -> list[TaskSpec]:
    purpose = "train" if run.is_trained else "eval"
    return [TaskSpec(i, i, SEED, purpose, run.temperature) for i in range(n)]


async def _check_prompts(run: RunSettings, actors: ActorSettings, n: int) -> None:
    """Begin the episodes that the model would play, before an engine is loaded for them.

    Raises:
        SettingsError: A prompt is too long, or there is no model.
    """
    tokenizer, limit_s = ModelTokenizer.for_run(run), actors.environment_timeout_s
    maker, environment = (
        EpisodeMaker(tokenizer, run, "env-test", limit_s=limit_s),
        make_environment(run),
    )
    try:
        for number, spec in enumerate(_specs(run, n)):
            await maker.begin_episode(Lease(number, 1, spec, 0), environment)
    except EpisodeError as error:
        raise SettingsError(str(error)) from None


@contextmanager
def own_stdout() -> Iterator[None]:
    """Send what engines, environments and rewards print to stderr: stdout has the result alone."""
    try:
        out, error = sys.stdout.fileno(), sys.stderr.fileno()
    except (OSError, ValueError):  # a test's
        with redirect_stdout(sys.stderr):
            yield
        return
    sys.stdout.flush()
    kept = os.dup(out)
    os.dup2(error, out)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, out)
        os.close(kept)


@asynccontextmanager
async def started_model(settings: Settings) -> AsyncIterator[LoadedModel]:
    """Start the engine of the run's model for the body, and end it afterwards.

    Raises:
        SettingsError: The model has no tokenizer, or the engine cannot run here.
        EngineError: The engine cannot start.
    """
    tokenizer = ModelTokenizer.for_run(settings.run)
    engine, _ = make_engine(settings)
    await engine.start()
    try:
        yield LoadedModel(engine, tokenizer)
    finally:
        await engine.close()


async def judge(
    run: RunSettings, actors: ActorSettings, played: Sequence[PlayedEpisode]
) -> list[Parts | RewardError]:
    """Let the run's reward functions judge episodes, those of an item together.

    Returns:
        For each episode its parts of the reward, or why a function failed on it. The parts are
        empty where the run has no reward function.
    """
    if not run.reward_functions:
        return [{} for _ in played]
    pool = RewardPool(run, actors)
    try:
        return await pool.score_by_item([episode.sample for episode in played])
    finally:
        await pool.close()


def _print(console: Console, shown: Shown, *, of: str) -> None:
    played, sample = shown.played, shown.played.sample
    failed = isinstance(shown.rewards, RewardError)
    reward = f"no reward: {shown.rewards}" if failed else f"reward {shown.reward:.3f}"
    print_line(
        console, f"{shown.policy}, item {sample.index}{of}: {reward}, ended by {played.ended}"
    )
    lines = [("prompt", played.prompt or text_of(sample.prompt))]
    lines += [
        ("policy" if turn.role == "assistant" else "environment", turn.content)
        for turn in sample.turns
    ]
    parts = played.score.parts | (shown.rewards if isinstance(shown.rewards, dict) else {})
    lines += [("parts", ", ".join(f"{name} {value:.3f}" for name, value in parts.items()))]
    lines += [("trained" if trained else "masked", repr(text)) for text, trained in played.pieces]
    for name, text in lines:
        first, *rest = (text or "-").split("\n")
        print_line(console, f"  {name:<12} {first}")
        for line in rest:
            print_line(console, f"  {'':<12} {line}")


def _as_json(shown: Shown) -> dict[str, Any]:
    played, sample = shown.played, shown.played.sample
    failed = isinstance(shown.rewards, RewardError)
    return {
        "environment": shown.environment,
        "policy": shown.policy,
        "item": sample.index,
        "prompt": played.prompt or text_of(sample.prompt),
        "turns": [turn._asdict() for turn in sample.turns],
        "reward": shown.reward,
        "parts": played.score.parts,
        "functions": str(shown.rewards) if failed else shown.rewards,
        "metrics": played.score.metrics,
        "ended": played.ended,
        "pieces": [{"text": text, "trained": trained} for text, trained in played.pieces],
    }
