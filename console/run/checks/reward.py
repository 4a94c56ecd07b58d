"""Check environments and rewards on one item of each, in the processes that a run has for them."""

from __future__ import annotations

from functools import partial
from itertools import chain

from actors.chat import read_prompt
from actors.engine.tokenizer import ModelTokenizer
from actors.engine.turns import before
from actors.environments.base import Conversation, tools_of
from actors.environments.registry import (
    check_environment,
    example_scores,
    for_each,
    naming,
    scores_of,
)
from actors.rewards.pool import Parts, score_answers
from actors.rewards.pool import check_reward as try_reward
from configs.errors import NyalaError, RewardError, SettingsError
from configs.settings import ActorSettings, LearnerSettings, RunSettings, Settings
from learner.data.grades import REWARD

from .check import Doubt
from .model import is_at_hand

REWARD_TIMEOUT_S = 60.0
NEVER_SEEN = {
    "rewards.weights": "weighs nothing",
    "run.eval_metric": "is replaced by the reward in evaluations",
}
"""What becomes of a part that no answer has, by the setting that names it."""


def check_reward(settings: Settings) -> str:
    """Each environment and its reward load, and score one sample; its prompt suits the model.

    Raises:
        SettingsError: One does not.
    """
    samples = for_each(settings.run, check_environment, limit_s=REWARD_TIMEOUT_S)
    described = []
    for run, sample in zip(settings.run.by_environment.values(), samples, strict=True):
        with naming(run):
            described.append(try_reward(run, settings.actors, sample))
            _check_prompt(run, sample)
            _check_echo(settings.learner, run, sample)
    return "; ".join(described)


def check_answers(settings: Settings) -> str | Doubt:
    """A right answer to the first item of each environment is rewarded more than an empty one.

    Raises:
        NyalaError: An environment or a reward cannot be loaded, or fails.
    """
    scored = for_each(
        settings.run, partial(_rewards_of, actors=settings.actors), limit_s=REWARD_TIMEOUT_S
    )
    found, doubts = [], []
    for run, rewards in zip(settings.run.by_environment.values(), scored, strict=True):
        if rewards is None:
            found.append(f"{run.environment}: no right and empty answer to compare")
            continue
        right, empty = rewards
        found.append(f"{run.environment}: right answer {right:g}, empty answer {empty:g}")
        if right <= empty:
            doubts.append(
                f"the reward of {run.environment} should be larger for a right answer than for an "
                f"empty one, got {right:g} and {empty:g}; look at both with `nyala env test`"
            )
    return Doubt("; ".join(doubts)) if doubts else "; ".join(found)


def check_stop(settings: Settings) -> str | Doubt:
    """A right answer to the first item of each environment is right where `run.stop` ends it, too.

    Raises:
        NyalaError: An environment or a reward cannot be loaded, or fails.
    """
    if not settings.run.stop:
        return "no strings"
    worse = partial(_worse_where_it_ends, actors=settings.actors)
    doubts = [*filter(None, for_each(settings.run, worse, limit_s=REWARD_TIMEOUT_S))]
    return Doubt("; ".join(doubts)) if doubts else "right answers stay right"


def _worse_where_it_ends(run: RunSettings, *, actors: ActorSettings) -> str:
    """Describe a right answer that a string of `run.stop` makes a worse one; empty = none is."""
    item = check_environment(run)
    shown = [turn.text for turn in item.demonstration if turn.trained]
    turns = shown if shown and not run.reward_functions else [item.answer or "".join(shown)]
    left = [before(run.stop, turn) for turn in turns]
    if left == turns:
        return ""
    if run.reward_functions:
        whole, cut = map(_total, score_answers(run, actors, item, [*turns, *left]))
    else:
        whole, cut = (score.reward if score else 0.0 for score in scores_of(run, (turns, left)))
    if cut >= whole:
        return ""
    turn, text = next((turn, text) for turn, text in zip(turns, left, strict=True) if turn != text)
    string = next(each for each in run.stop if turn.startswith(each, len(text)))
    return (
        f"run.stop should leave right answers of {run.environment} right, got {string!r}, before "
        f"which {turn!r:.60} has only {text!r:.60} and a reward of {cut:g} instead of {whole:g}; "
        f"take it out, or choose a string that no answer needs"
    )


def _rewards_of(run: RunSettings, *, actors: ActorSettings) -> tuple[float, float] | None:
    """Return the rewards of a right answer and of an empty one; None where one of them is none."""
    item = check_environment(run)
    script = [turn.text for turn in item.demonstration if turn.trained]
    if item.answer is None and not script:
        return None
    if not run.reward_functions:
        shown, told, silent = example_scores(run)
        best = shown or told
        return None if best is None or silent is None else (best.reward, silent.reward)
    right, empty = score_answers(run, actors, item, [item.answer or "".join(script), ""])
    return _total(right), _total(empty)


def _total(parts: Parts | RewardError) -> float:
    if isinstance(parts, RewardError):
        raise parts
    return sum(parts.values())


def _check_prompt(run: RunSettings, sample: Conversation) -> None:
    """The prompt is short enough, and the model's template takes its messages and tools."""
    prompt, tools = read_prompt(sample.prompt), tools_of(sample)
    if run.model == "init":
        if tools or not isinstance(prompt, str):
            raise SettingsError(
                f"run.model must be a chat model for {'tools' if tools else 'messages'}, got init, "
                f"which makes a character model; choose a chat model, or give prompts as text"
            )
        length = len(prompt)  # one character is one token
    elif not is_at_hand(run):  # the check of the model says so, once
        return
    else:
        try:
            tokenizer = ModelTokenizer.of(run)
        except SettingsError:  # the check of the model says so, once
            return
        length = len(tokenizer.encode_prompt(prompt, tools))
    if length > run.max_prompt_tokens:
        raise SettingsError(
            f"run.max_prompt_tokens must be enough for the prompts of {run.environment}, got "
            f"{run.max_prompt_tokens} for one of {length} tokens; raise it, or shorten the prompts"
        )


def _check_echo(learner: LearnerSettings, run: RunSettings, sample: Conversation) -> None:
    """A supervised start can repeat a question, and nothing that comes later."""
    turns = sum(turn.trained for turn in sample.demonstration)
    if run.model == "init" and learner.warm_start_echo and turns > 1:
        raise SettingsError(
            f"learner.warm_start_echo must be 0 for an environment of several turns, got "
            f"{learner.warm_start_echo:g} for {run.environment}; set it to 0"
        )


def parts_warning(settings: Settings) -> str | None:
    """Name the weights, and what is evaluated by, without a part in examples.

    It may appear in others, after a tool's use.
    """
    run = settings.run
    metric = [run.eval_metric] if run.eval_metric not in (None, REWARD) else []
    named = {"rewards.weights": [*settings.rewards.weights], "run.eval_metric": metric}
    if not any(named.values()):
        return None
    asked = " and ".join(name for name, parts in named.items() if parts)
    try:
        scores = chain(*for_each(run, example_scores, limit_s=REWARD_TIMEOUT_S))
        known = set().union(*(score.parts for score in scores if score is not None))
    except NyalaError as error:
        return f"the names in {asked} were not checked: {error}"
    for alone in run.by_environment.values():
        known |= {*alone.reward_functions, *(["environment"] if alone.reward else [])}
    there = ", ".join(sorted(known)) or "none"
    found = [
        f"{name} must name parts of the reward, and examples have none of {', '.join(missing)}, "
        f"only {there}; a name that is never seen {NEVER_SEEN[name]}"
        for name, parts in named.items()
        if (missing := [part for part in parts if part not in known])
    ]
    return "; ".join(found) or None
