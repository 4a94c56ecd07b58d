"""`nyala data`: a look at a dataset before a run is trained on it."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from statistics import median
from typing import Annotated, NamedTuple

import typer

from actors.chat import ChatMessage, Prompt, text_of
from actors.engine.tokenizer import ModelTokenizer
from actors.environments.dataset.environment import Dataset, DatasetConversation
from actors.environments.registry import make_dataset, naming
from actors.rewards.functions import RewardSample
from actors.rewards.pool import Parts, RewardPool
from configs.errors import RewardError, SettingsError, quoted
from configs.loader import load
from configs.settings import ActorSettings, RunSettings
from configs.tables.environments import OF_ROWS
from console.command_line import AsJson, Config, ConfigOption, Overrides, one_of
from console.run.checks.reward import prompt_lengths

from .tables import ResultTable, print_facts

# --------------------------------------------------------------------------------------------------
# Examination of a dataset before a run is trained on it: counts, lengths, answers.


LATEX = re.compile(r"\\[A-Za-z]+|[\^_]\{")


class DataFinding(NamedTuple):
    """One line of an examination."""

    what: str
    result: str
    advice: str = ""
    """What to do about the result; empty = nothing."""

    def as_row(self) -> dict[str, str]:
        """Return the row that is printed, by the names of its columns."""
        return {"what": self.what, "found": self.result, "advice": self.advice}


class TokenCounters(NamedTuple):
    """The functions that count tokens."""

    prompt: Callable[[Prompt], int]
    """Counts a prompt with all that the template puts around it."""
    answer: Callable[[str], int]
    """Counts an answer with the end of the turn and nothing else: no template precedes it."""


NOTHING = "the run would reward nothing"
REFUSED = "the run would be refused"
FAULTS = (NOTHING, REFUSED)
"""Begin the advice about a fault for which the exit code is 1."""
PROMPTS_S = 120.0
"""Limit of the time for counting the tokens of prompts."""


def examine(
    dataset: Dataset, run: RunSettings, *, count: TokenCounters, rows: int
) -> Iterator[DataFinding]:
    """Count the prompts of all rows, and look at the first rows of both sides.

    Args:
        dataset: The whole dataset.
        run: Settings with the limits of lengths.
        count: Counts tokens.
        rows: Number of rows to look at.

    Raises:
        SettingsError: A row cannot be read.
    """
    seen = list(islice(dataset.all_rows(), rows))
    training, held_out, _ = dataset.counts
    yield from _counts(dataset, run)
    if len(seen) < training + held_out:
        yield DataFinding(
            "rows looked at",
            f"{len(seen):,} of {training + held_out:,}; prompts of all",
            f"--rows {training + held_out} looks at all answers, too",
        )
    yield DataFinding("columns", ", ".join(seen[0][0].columns))
    if not run.has_agents:
        yield _prompts(dataset, run, count)
    answers = [c.answer for c, _ in seen if c.answer is not None]
    if answers and not dataset.describes_answers:
        limit, name = run.max_completion_tokens, "run.max_completion_tokens"
        yield _lengths("answer", map(count.answer, answers), limit, name)
    asked = Counter(conversation.identity for conversation, _ in seen)
    again = sum(asked.values()) - len(asked)
    yield DataFinding(
        "questions asked twice", f"{again:,}", "they count twice as much" * bool(again)
    )
    in_latex = sum(LATEX.search(answer) is not None for answer in answers)
    if in_latex and run.environment_settings.get("scorer") in (None, "exact", "numeric"):
        advice = "scorer: math-verify compares them by their value; install the extra `math`"
        yield DataFinding("answers in LaTeX", f"{in_latex:,} of {len(answers):,}", advice)
    if answers and not dataset.describes_answers:
        yield _said_back([conversation for conversation, _ in seen])


def _counts(dataset: Dataset, run: RunSettings) -> Iterator[DataFinding]:
    """Count the rows of each side; a side that the run needs must have some."""
    training, held_out, left_out = dataset.counts
    nothing = f"{REFUSED}: none is left to train on; hold out fewer"
    yield DataFinding(
        "rows to train on", f"{training:,}", nothing * (run.is_trained and not training)
    )
    advice = ""
    if run.eval_episodes and not held_out:
        advice = f"{REFUSED}: name a file as held_out, or set run.eval_episodes to 0"
    elif run.eval_episodes > held_out:
        advice = f"an evaluation of {run.eval_episodes} asks some twice"
    yield DataFinding("rows held out", f"{held_out:,}", advice)
    if left_out:
        yield DataFinding("rows left out", f"{left_out:,}", "they are held out, too")


def _prompts(dataset: Dataset, run: RunSettings, count: TokenCounters) -> DataFinding:
    """Count the tokens of all prompts, as the checks of a start do."""
    counted = prompt_lengths(dataset, lambda prompt, _: count.prompt(prompt), seconds=PROMPTS_S)
    spread = _spread(counted.tokens, run.max_prompt_tokens, "run.max_prompt_tokens")
    refusal = counted.refusal(run)
    if not counted.is_whole:
        spread += f" (of {counted.looked_at})"
    return DataFinding("prompt, tokens", spread, f"{REFUSED}: {refusal}" if refusal else "")


def _spread(lengths: Sequence[int], limit: int, setting: str) -> str:
    return f"{min(lengths)} to {max(lengths)}, median {median(lengths):g}, {setting} {limit}"


def _lengths(what: str, counts: Iterable[int], limit: int, setting: str) -> DataFinding:
    lengths = list(counts)
    over = sum(length > limit for length in lengths)
    spread = _spread(lengths, limit, setting)
    advice = f"{over} of {len(lengths)} are too long: raise {setting}, or leave them out"
    return DataFinding(f"{what}, tokens", spread, advice if over else "")


def _said_back(conversations: list[DatasetConversation]) -> DataFinding:
    right: list[bool] = []
    for conversation in conversations:
        conversation.step(conversation.answer or "")
        right.append(conversation.score().parts["exact"] == 1.0)
    result = f"{sum(right)} of {len(right)} right"
    if all(right):
        return DataFinding("answers, said back to the scorer", result)
    advice = f"the first that is not: {quoted(conversations[right.index(False)].answer, 60)}"
    return DataFinding(
        "answers, said back to the scorer", result, advice if any(right) else f"{NOTHING}; {advice}"
    )


# --------------------------------------------------------------------------------------------------
# `nyala data`: a look at a dataset before a run is trained on it.

SAMPLES = 8  # that reward functions judge
MARKED = ("<answer>ANSWER</answer>", "\\boxed{ANSWER}", "#### ANSWER")
"""Forms of an answer that a function may ask for; a bare one comes first."""

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Look at a dataset before a run is trained on it.\n\n"
    "Example: `nyala data check mine.yaml`",
)


@app.callback()
def _group() -> None:
    """Keep `check` a word of its own, although it is the only command."""


@app.command()
def check(
    config: Config = None,
    config_option: ConfigOption = None,
    overrides: Overrides = None,
    rows: Annotated[
        int, typer.Option(min=1, help="Rows to look at; prompts are counted in all.")
    ] = 10_000,
    as_json: AsJson = False,
) -> None:
    """Count rows, tokens and repeated questions; score right answers and empty ones.

    Starts no engine and trains nothing. Every row is read once, so a bad one is named. The exit
    code is 1 for what a run would refuse, and where no right answer is rewarded.

    Example: `nyala data check mine.yaml`
    """
    settings = load(one_of(config, config_option), overrides or ())
    environments = settings.run.by_environment.items()
    examined = []
    for name, run in environments:
        if run.environment in OF_ROWS:
            with naming(run):
                title = f"{run.environment_settings.get('path')}, as {run.name} would train on it"
                label = {"environment": name} if len(environments) > 1 else {}
                findings = _examine(run, settings.actors, rows)
                examined.append(
                    ResultTable(title, [label | finding.as_row() for finding in findings])
                )
    if not examined:
        names = ", ".join(run.environment for _, run in environments)
        raise SettingsError(
            f"run.environment must be dataset or agent, got {names}; only rows of a file can "
            "be counted: use `nyala env test` for other environments"
        )
    if as_json:
        print_facts(
            ResultTable("", [row for facts in examined for row in facts.rows]), as_json=True
        )
    else:
        for facts in examined:
            print_facts(facts, as_json=False)
    if any(row["advice"].startswith(FAULTS) for facts in examined for row in facts.rows):
        raise typer.Exit(1)


def _examine(run: RunSettings, actors: ActorSettings, rows: int) -> list[DataFinding]:
    """Look at the dataset of a run that has one environment."""
    dataset = make_dataset(run)
    findings = list(examine(dataset, run, count=token_counter(run), rows=rows))
    return findings + (asyncio.run(_rewards(dataset, run, actors)) if run.reward else [])


def token_counter(run: RunSettings) -> TokenCounters:
    """Return the functions that count the tokens of prompts and answers.

    Raises:
        SettingsError: The model's tokenizer cannot be loaded.
    """
    if run.model == "init":  # one character is one token
        return TokenCounters(lambda prompt: len(text_of(prompt)), lambda answer: len(answer) + 1)
    tokenizer = ModelTokenizer.for_run(run)
    return TokenCounters(
        lambda prompt: len(tokenizer.encode_prompt(prompt)),
        lambda answer: len(tokenizer.encode_answer(answer)),
    )


async def _rewards(dataset: Dataset, run: RunSettings, actors: ActorSettings) -> list[DataFinding]:
    """Let reward functions judge right answers, where there are any, and empty ones."""
    items = [dataset.begin(index, 0, held_out=not run.is_trained) for index in range(SAMPLES)]
    pool = RewardPool(run, actors)

    async def judged(form: str) -> list[Parts | RewardError]:
        said = [form.replace("ANSWER", item.answer or "") for item in items]
        return await pool.score(
            [
                _sample(run, item, text, index)
                for index, (item, text) in enumerate(zip(items, said, strict=True))
            ]
        )

    try:
        await pool.try_out(items[0])
        right, empty = await judged("ANSWER"), await judged("")
        forms = [right]
        if all(item.answer for item in items) and not _is_more(right, empty):
            forms += [await judged(form) for form in MARKED]
    finally:
        await pool.close()
    findings = [_judged("right", right), _judged("empty", empty)]
    if len(forms) > 1 and not any(_is_more(form, empty) for form in forms):
        findings[0] = findings[0]._replace(
            advice=f"{NOTHING}: no right answer gets more than an empty one; "
            f"{findings[0].advice or 'look at what the function gets with `nyala env test`'}"
        )
    return findings


def _sample(run: RunSettings, item: DatasetConversation, text: str, index: int) -> RewardSample:
    """Make the sample that a function gets for an answer in a run."""
    item.step(text)
    return RewardSample.from_conversation(
        item,
        [ChatMessage("assistant", text)],
        index=index,
        environment_reward=item.score().reward,
        data_source=run.environment,
    )


def _is_more(right: Sequence[Parts | RewardError], empty: Sequence[Parts | RewardError]) -> bool:
    """Whether a right answer has a larger reward than the empty one to the same question."""
    return any(
        not isinstance(reward, RewardError)
        and (isinstance(other, RewardError) or sum(reward.values()) > sum(other.values()))
        for reward, other in zip(right, empty, strict=True)
    )


def _judged(what: str, results: list[dict[str, float] | RewardError]) -> DataFinding:
    scored = [result for result in results if not isinstance(result, RewardError)]
    failed = [result for result in results if isinstance(result, RewardError)]
    means = {
        name: sum(parts.get(name, 0.0) for parts in scored) / len(scored)
        for name in sorted({name for parts in scored for name in parts})
    }
    mean_parts = ", ".join(f"{name} {mean:.3f}" for name, mean in means.items()) or "none"
    advice = f"{len(failed)} of {len(results)} failed: {failed[0]}" if failed else ""
    return DataFinding(f"reward of {len(results)} {what} answers", mean_parts, advice)
