"""Checks of environments and rewards on one item of each, and of the lengths of prompts.

Each is tried in the processes that a run has for it. The first line of a check says what holds if
it returns; it returns figures for `nyala doctor`.

Tokens are counted for the prompts of all rows of a dataset, within a time limit, and of the first
items of other environments. A run pauses as soon as one task in a hundred has failed because its
prompt is too long.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import NamedTuple

from actors.chat import Prompt, read_prompt, text_of
from actors.engine.tokenizer import ModelTokenizer
from actors.engine.turns import before
from actors.environments.base import Conversation, Score, tools_of
from actors.environments.dataset.environment import Dataset
from actors.environments.registry import (
    check_environment,
    example_prompts,
    example_scores,
    for_each,
    make_dataset,
    naming,
    scores_of,
)
from actors.rewards.pool import Parts, score_answers
from actors.rewards.pool import check_reward as try_reward
from configs.errors import DeadlineError, NyalaError, RewardError, SettingsError, quoted
from configs.settings import ActorSettings, LearnerSettings, RunSettings, Settings
from configs.tables.environments import OF_ROWS
from learner.data.grades import REWARD
from learner.data.records import shaped
from learner.data.sampler import PromptSampler

from .check import CheckWarning
from .model import is_at_hand

REWARD_TIMEOUT_S = 60.0
PROMPTS_S = 20.0
"""Time to read and count the prompts of an environment, some thousand a second."""
MOST_PROMPTS = 50_000
"""Prompts of a dataset that are counted at most, the longest texts first."""
MOST_ITEMS = 32
"""Prompts of another environment that are counted at most."""
NO_COUNTER = "the model that counts them is not here"
SHOWN = 60
"""Characters of a prompt that are shown."""
NEVER_SEEN = {
    "rewards.weights": "weighs nothing",
    "run.eval_metric": "is replaced by the reward in evaluations",
}
"""Setting -> effect of naming a part of the reward that no answer has."""


def check_reward(settings: Settings) -> str:
    """Each environment and its reward load and score one sample, whose prompt suits the model.

    Raises:
        SettingsError: One of them does not.
        DeadlineError: An environment takes longer than `REWARD_TIMEOUT_S`.
    """
    samples = for_each(settings.run, check_environment, limit_s=REWARD_TIMEOUT_S)
    described = []
    for run, sample in zip(settings.run.by_environment.values(), samples, strict=True):
        with naming(run):
            described.append(try_reward(run, settings.actors, sample))
            _check_prompt(run, sample)
            _check_echo(settings.learner, run, sample)
    return "; ".join(described)


def check_answers(settings: Settings) -> str | CheckWarning:
    """A right answer to the first item of each environment is rewarded more than an empty one.

    Raises:
        NyalaError: An environment or a reward cannot be loaded, or fails.
    """
    scored = for_each(
        settings.run, partial(_rewards_of, settings=settings), limit_s=REWARD_TIMEOUT_S
    )
    results, doubts = [], []
    for run, rewards in zip(settings.run.by_environment.values(), scored, strict=True):
        if rewards is None:
            results.append(f"{run.environment}: no right and empty answer to compare")
            continue
        right, empty = rewards
        results.append(f"{run.environment}: right answer {right:g}, empty answer {empty:g}")
        if right <= empty:
            doubts.append(
                f"the reward of {run.environment} should be larger for a right answer than for an "
                f"empty one, got {right:g} and {empty:g}; look at both with `nyala env test`"
            )
    return CheckWarning("; ".join(doubts)) if doubts else "; ".join(results)


def check_stop(settings: Settings) -> str | CheckWarning:
    """A right answer to the first item of each environment stays right if `run.stop` ends it.

    Raises:
        NyalaError: An environment or a reward cannot be loaded, or fails.
    """
    if not settings.run.stop:
        return "no strings"
    worse = partial(_worse_where_it_ends, actors=settings.actors)
    doubts = [*filter(None, for_each(settings.run, worse, limit_s=REWARD_TIMEOUT_S))]
    return CheckWarning("; ".join(doubts)) if doubts else "right answers stay right"


def _worse_where_it_ends(run: RunSettings, *, actors: ActorSettings) -> str:
    """Describe a right answer that a string of `run.stop` makes worse; empty = there is none."""
    item = check_environment(run)
    shown = [turn.text for turn in item.demonstration if turn.trained]
    turns = shown if shown and not run.reward_functions else [item.answer or "".join(shown)]
    left = [before(run.stop, turn) for turn in turns]
    if left == turns:
        return ""
    if run.reward_functions:
        judged = score_answers(run, actors, item, [*turns, *left])
        whole, cut = (sum(_parts_of(parts).values()) for parts in judged)
    else:
        whole, cut = (score.reward if score else 0.0 for score in scores_of(run, (turns, left)))
    if cut >= whole:
        return ""
    turn, text = next((turn, text) for turn, text in zip(turns, left, strict=True) if turn != text)
    string = next(stop for stop in run.stop if turn.startswith(stop, len(text)))
    return (
        f"run.stop should have no string that ends a right answer of {run.environment} too early, "
        f"got {string!r}, which cuts {quoted(turn, 60)} down to {quoted(text, 60)} and its reward "
        f"from {whole:g} to {cut:g}; take it out, or choose a string that no answer needs"
    )


def _rewards_of(run: RunSettings, *, settings: Settings) -> tuple[float, float] | None:
    """Return the rewards of a right and an empty answer; None if one of them has no reward."""
    item = check_environment(run)
    script = [turn.text for turn in item.demonstration if turn.trained]
    if item.answer is None and not script:
        return None
    rewards = settings.rewards
    shown, told, silent = example_scores(run)
    scores = [shown or told, silent]
    if run.reward_functions:
        answers = [item.answer or "".join(script), ""]
        judged = score_answers(run, settings.actors, item, answers)
        scores = [
            (score or Score(0.0)).judged(_parts_of(parts))
            for score, parts in zip(scores, judged, strict=True)
        ]
    limits = 0, run.max_completion_tokens
    right, empty = (
        None if score is None else shaped(score.reward, score.parts, rewards, tokens=limits)[0]
        for score in scores
    )
    return None if right is None or empty is None else (right, empty)


def _parts_of(result: Parts | RewardError) -> Parts:
    if isinstance(result, RewardError):
        raise result
    return result


def _check_prompt(run: RunSettings, sample: Conversation) -> None:
    """The model's template takes the messages and tools of the prompt, if it has any."""
    prompt, tools = read_prompt(sample.prompt), tools_of(sample)
    if run.model == "init" and (tools or not isinstance(prompt, str)):
        raise SettingsError(
            f"run.model must be a chat model for {'tools' if tools else 'messages'}, got init, "
            f"which makes a character model; choose a chat model, or give prompts as text"
        )
    count = prompt_counter(run)
    if count is not None:
        count(prompt, tools)


CountPrompt = Callable[[Prompt, str], int]
"""Counts the tokens of a prompt in its template, with the tools that the policy may call."""


def prompt_counter(run: RunSettings) -> CountPrompt | None:
    """Return a function that counts the tokens of prompts; None if the model is not here.

    The check of the model reports a missing model.
    """
    if run.model == "init":
        return lambda prompt, _: len(text_of(prompt))  # one character is one token
    try:
        tokenizer = ModelTokenizer.for_run(run) if is_at_hand(run) else None
    except SettingsError:
        return None
    if tokenizer is None:
        return None
    return lambda prompt, tools: len(tokenizer.encode_prompt(prompt, tools))


class PromptLengths(NamedTuple):
    """Tokens of the prompts of an environment."""

    tokens: list[int]
    """Tokens of each prompt that was counted."""
    total: int | None
    """Number of prompts of the environment; None = without end."""
    longest: str
    """Beginning of the prompt with most tokens."""
    were_read: bool = True
    """Whether all rows were read before the longest texts were chosen."""

    @property
    def is_whole(self) -> bool:
        """Whether all prompts were counted, or of very many the longest `MOST_PROMPTS`."""
        counts = self.total is None or len(self.tokens) >= min(self.total, MOST_PROMPTS)
        return counts and self.were_read

    @property
    def looked_at(self) -> str:
        """Description of the prompts that were counted."""
        if self.total is None:
            return f"the first {len(self.tokens)} prompts"
        if not self.were_read:
            return f"{len(self.tokens)} of {self.total} prompts, from the first rows"
        if len(self.tokens) < self.total:
            return f"the {len(self.tokens)} longest of {self.total} prompts"
        return f"{self.total} prompts"

    def refusal(self, run: RunSettings) -> str:
        """Return why a run with these prompts would not go on; empty = it would."""
        limit, most = run.max_prompt_tokens, max(self.tokens)
        over = sum(length > limit for length in self.tokens)
        if not over:
            return ""
        return (
            f"run.max_prompt_tokens must be enough for the prompts of {run.environment}, got "
            f"{limit} for {over} of {self.looked_at}, of up to {most} tokens ({self.longest!r}); "
            f"raise it to {most}, or shorten such prompts or leave them out"
        )


def prompt_lengths(
    dataset: Dataset, count: CountPrompt, *, seconds: float = PROMPTS_S
) -> PromptLengths:
    """Count the tokens of a dataset's prompts, trained and held out, the longest texts first.

    Args:
        dataset: The whole dataset.
        count: Function that counts tokens.
        seconds: Time for reading and counting; the remaining prompts are not counted.
    """
    training, held_out, _ = dataset.counts
    until = time.monotonic() + seconds

    were_read = True

    def read() -> Iterator[tuple[int, int, Prompt]]:
        nonlocal were_read
        for number, (conversation, _) in enumerate(dataset.all_rows()):
            prompt = read_prompt(conversation.prompt)
            yield len(text_of(prompt)), -number, prompt
            if time.monotonic() > until - seconds / 2:
                were_read = number + 1 == training + held_out
                return

    longest = heapq.nlargest(MOST_PROMPTS, read())
    prompts = ((prompt, "") for *_, prompt in longest)
    return _counted(prompts, count, until, training + held_out)._replace(were_read=were_read)


def _counted(
    prompts: Iterator[tuple[Prompt, str]], count: CountPrompt, until: float, total: int | None
) -> PromptLengths:
    tokens: list[int] = []
    most, longest = -1, ""
    for prompt, tools in prompts:
        tokens.append(count(prompt, tools))
        if tokens[-1] > most:
            most, longest = tokens[-1], text_of(prompt)[:SHOWN]
        if time.monotonic() > until:
            break
    return PromptLengths(tokens, total, longest)


def check_prompts(settings: Settings, *, has_begun: bool) -> str | CheckWarning:
    """No prompt is longer than `run.max_prompt_tokens`.

    Args:
        settings: Settings of the run.
        has_begun: Whether the run keeps its settings, so that a longer prompt is only a doubt.

    Raises:
        SettingsError: A prompt is longer.
    """
    results, doubts = [], []
    try:
        lengths = for_each(settings.run, _lengths_of, limit_s=REWARD_TIMEOUT_S)
    except DeadlineError as error:
        return CheckWarning(f"{error}; no prompt was counted: `nyala data check` has more time")
    for run, counted in zip(settings.run.by_environment.values(), lengths, strict=True):
        if counted is None or not counted.tokens:
            why = "what agents ask is not known before" if run.has_agents else NO_COUNTER
            results.append(f"{run.environment}: {why}")
            continue
        refusal = counted.refusal(run)
        if refusal and not has_begun:
            with naming(run):
                raise SettingsError(refusal)
        if refusal:
            doubts.append(f"{refusal}; as this run keeps its settings, begin it anew with --fresh")
        elif not counted.is_whole:
            doubts.append(
                f"all prompts of {run.environment} should be counted, got {counted.looked_at} in "
                f"{PROMPTS_S:g} s, none of them too long; `nyala data check` has more time"
            )
        results.append(
            f"{run.environment}: {min(counted.tokens)} to {max(counted.tokens)} tokens in "
            f"{counted.looked_at}"
        )
    return CheckWarning("; ".join(doubts)) if doubts else "; ".join(results)


def check_sampler(run: RunSettings) -> str:
    """`run.sampler` loads, chooses the same prompts twice, and asks no row of a dataset twice.

    Raises:
        SettingsError: It does not, or the rows cannot be read.
        DeadlineError: They cannot be read within `REWARD_TIMEOUT_S`.
    """
    PromptSampler(run).try_out()
    rows = for_each(run, _training_rows, limit_s=REWARD_TIMEOUT_S)
    for (name, alone), count in zip(run.by_environment.items(), rows, strict=True):
        prompts = alone.sampler_prompts or 0
        if count is not None and prompts > count:
            raise SettingsError(
                f"run.sampler_prompts must be at most the training rows of {name} = {count}, got "
                f"{prompts}; a row would be measured as several prompts: set it to {count}"
            )
    return f"{run.sampler} chooses"


def _training_rows(run: RunSettings) -> int | None:
    """Count the rows that an environment trains on; None if it makes its own."""
    return make_dataset(run).counts[0] if run.environment in OF_ROWS else None


def _lengths_of(run: RunSettings) -> PromptLengths | None:
    """Count the tokens of an environment's prompts; None if nobody knows them, or the tokenizer."""
    count = prompt_counter(run)
    if count is None or run.has_agents:
        return None
    if run.environment == "dataset" and (dataset := make_dataset(run)).factory is None:
        return prompt_lengths(dataset, count)
    prompts = example_prompts(run, MOST_ITEMS, seconds=PROMPTS_S / 4)
    return _counted(iter(prompts), count, time.monotonic() + PROMPTS_S, None)


def _check_echo(learner: LearnerSettings, run: RunSettings, sample: Conversation) -> None:
    """Refuse `learner.warm_start_echo` for several turns: it repeats the first question only."""
    turns = sum(turn.trained for turn in sample.demonstration)
    if run.model == "init" and learner.warm_start_echo and turns > 1:
        raise SettingsError(
            f"learner.warm_start_echo must be 0 for an environment of several turns, got "
            f"{learner.warm_start_echo:g} for {run.environment}; set it to 0"
        )


def parts_warning(settings: Settings) -> str | None:
    """Name the reward parts in settings that no example has; None = there are none.

    Other episodes may have such a part, after the use of a tool.
    """
    run = settings.run
    metric = [run.eval_metric] if run.eval_metric not in (None, REWARD) else []
    named = {"rewards.weights": [*settings.rewards.weights], "run.eval_metric": metric}
    if not any(named.values()):
        return None
    asked = " and ".join(name for name, parts in named.items() if parts)
    try:
        scores = chain(*for_each(run, example_scores, limit_s=REWARD_TIMEOUT_S))
        seen = set().union(*(score.parts for score in scores if score is not None))
    except NyalaError as error:
        return f"the names in {asked} were not checked: {error}"
    for alone in run.by_environment.values():
        seen |= {*alone.reward_functions, *(["environment"] if alone.reward else [])}
    there = ", ".join(sorted(seen)) or "none"
    missing_parts = [
        f"{name} must name parts of the reward, got {', '.join(missing)}, which examples lack "
        f"(they have {there}); correct it: a part that no answer has {NEVER_SEEN[name]}"
        for name, parts in named.items()
        if (missing := [part for part in parts if part not in seen])
    ]
    return "; ".join(missing_parts) or None
