"""Questions out of a file: `environment: dataset`.

    run:
      environment: dataset
      environment_settings: {path: questions.jsonl, prompt: question, answer: answer}

Every row is a question of one turn. Training goes through all rows in a shuffled order, then in
another one: row and order are a pure function of the item's number, so a restart or a rewind
changes nothing. A tenth of the questions, chosen by their text, is held out, or a second file is.
With a class that plays the rows, a question is the whole row, because the class reads its columns.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from actors.chat import GivenPrompt, column_at, columns_in, fill_in, read_prompt, text_of
from actors.environments.base import Score, Segment, Step, is_held_out
from actors.environments.final_answer import FORMAT
from configs.errors import SettingsError, quoted

from .programs import FORM
from .rows import Row, Rows, open_rows
from .scorers import Scorer, make_scorer

# --------------------------------------------------------------------------------------------------
# `run.environment_settings` of `environment: dataset`.


class DatasetSettings(BaseModel):
    """The place of the rows, the columns of question and answer, and the scorer."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    path: str
    """`.jsonl`, `.json`, `.csv`, `.tsv` or `.parquet`; a folder that `datasets` has saved, or a
    name on its hub."""
    prompt: str = "prompt"
    """The column of the prompt, a text or a list of messages; or a text with columns in braces,
    such as `Translate: {english}`. Points lead into a column: `extra_info.question`."""
    answer: str | None = None
    """The column of the reference answer, or of tests; or a text with columns in braces; null where
    a reward function needs none."""
    scorer: (
        Literal["exact", "numeric", "choice", "regex", "json_schema", "math-verify", "code"] | None
    ) = None
    """How an answer is compared with the reference; null = `exact` where there is one."""
    answer_format: str | None = None
    """Tells the model how to answer, behind the prompt; empty = nothing does, null = Nyala's own
    sentence, which `regex` and `json_schema` do without."""
    held_out: str | None = None
    """Where held-out rows are, as in `path`; null = a tenth of `path`, or its `held_out_split`."""
    split: str = "train"
    """The split of a folder or a name on the hub."""
    held_out_split: str | None = None
    """The split of `held_out`, or of `path`, that is held out; null = `split`."""
    subset: str | None = None
    """The subset of a name on the hub that has several."""
    seed: int = Field(default=0, ge=0)
    """Seed of the order of rows."""
    factory: str | None = None
    """`path/to/file.py:Class` or `module:Class`: the class that plays the rows, of TRL's form,
    whose methods are tools, or of skyrl-gym's."""
    factory_settings: dict[str, Any] = Field(default_factory=dict)
    """Keywords of `factory`."""
    time_limit_s: float = Field(default=5.0, gt=0)
    """CPU time of a program of `code` in one test."""
    memory_limit_mb: int = Field(default=512, ge=64)
    """Memory of a program of `code`."""

    @property
    def holds_out_rows(self) -> bool:
        """Whether the held-out rows come from a file or a split of their own."""
        return self.held_out is not None or self.held_out_split is not None


# --------------------------------------------------------------------------------------------------
# Questions out of a file: `environment: dataset`.

FORMS = {"regex": "", "json_schema": "", "code": FORM}
"""The sentence about the form of an answer, for scorers whose column of answers has no answer."""
STRUCTURED: dict[str, tuple[type, ...]] = {"json_schema": (dict,), "code": (dict, list)}
"""Types that a column of answers may have beside texts and numbers: schemas, and tests."""
CACHED_ORDERS = 2  # of this pass and of the next


class DatasetConversation:
    """One row: its question, and one answer to it."""

    def __init__(self, row: Row, settings: DatasetSettings, scorer: Scorer) -> None:
        self._row = row
        self._settings = settings
        self._scorer = scorer
        self._text = ""

    @property
    def prompt(self) -> GivenPrompt:
        """The question, with the sentence about the form of the answer behind it."""
        question = prompt_of(self._row, self._settings)
        form = _answer_form(self._settings)
        if not form:
            return question
        if isinstance(question, str):
            return f"{question.rstrip()}\n\n{form}"
        *before, last = question
        return [*before, {**last, "content": f"{last['content'].rstrip()}\n\n{form}"}]

    @property
    def answer(self) -> str | None:
        """The reference answer, if the rows have one."""
        reference = reference_of(self._row, self._settings)
        if isinstance(reference, dict | list):  # a schema, or tests
            return json.dumps(reference, ensure_ascii=False)
        return None if reference is None else str(reference)

    @property
    def columns(self) -> dict[str, Any]:
        """All columns of the row."""
        return dict(self._row)

    @property
    def identity(self) -> str:
        """The identity of the question: rows with the same identity are one question."""
        return identity_of(self._row, prompt_of(self._row, self._settings), self._settings)

    @property
    def demonstration(self) -> tuple[Segment, ...]:
        """The reference answer as the only turn."""
        is_one = self.answer is not None and _scorer(self._settings) not in FORMS
        return (Segment(str(self.answer), trained=True),) if is_one else ()

    def step(self, text: str) -> Step:
        """Take the answer; there is no second turn."""
        self._text = text
        return Step()

    def score(self) -> Score:
        """Compare the final answer with the reference; 0 without one: a reward function judges.

        The metric `unparsed` is 1 for an answer that the scorer cannot read.

        Raises:
            RewardError: The process of a scorer cannot be started.
        """
        if self._settings.answer is None:
            return Score(0.0)
        score = self._scorer(self._text, reference_of(self._row, self._settings))
        right = score or 0.0
        return Score(right, {"exact": right}, {"unparsed": float(score is None)})


class Dataset:
    """Rows of a file, split into training and held-out ones.

    Raises:
        SettingsError: A file or a column is missing, or a row has no prompt or no answer that the
            scorer takes; all rows are read once.
    """

    is_thread_safe = True

    def __init__(self, **settings: Any) -> None:
        self._settings = DatasetSettings(**settings)
        self._scorer = make_scorer(
            _scorer(self._settings),
            time_s=self._settings.time_limit_s,
            memory_mb=self._settings.memory_limit_mb,
        )
        path, subset, split = self._settings.path, self._settings.subset, self._settings.split
        self._rows = open_rows(path, subset=subset, split=split)
        self._held_out_rows = self._rows
        self._training, self._held_out = self._divide()
        self._order = lru_cache(CACHED_ORDERS)(self._shuffle)

    def begin(self, index: int, seed: int, *, held_out: bool) -> DatasetConversation:  # noqa: ARG002 - a row is its number
        """Make the conversation of an item; members of a group share it, whatever their seeds.

        Raises:
            SettingsError: There are no rows of that kind.
        """
        if held_out:
            return DatasetConversation(self._held_out_row(index), self._settings, self._scorer)
        if not self._training:
            raise SettingsError(
                f"run.environment_settings.path must have rows to train on, got none that is not "
                f"held out among {len(self._rows)} in {self._settings.path}; add rows, or name "
                "another file as held_out"
            )
        turn, place = divmod(index, len(self._training))
        row = self._rows[self._training[int(self._order(turn)[place])]]
        return DatasetConversation(row, self._settings, self._scorer)

    def all_rows(self) -> Iterator[tuple[DatasetConversation, bool]]:
        """Yield the training rows and then the held-out ones, with whether a row is held out.

        Each kind is in the order of its file. Training rows that are held out elsewhere are left
        out.
        """
        for number in self._training:
            yield DatasetConversation(self._rows[number], self._settings, self._scorer), False
        for number in self._held_out:
            yield (
                DatasetConversation(self._held_out_rows[number], self._settings, self._scorer),
                True,
            )

    @property
    def factory(self) -> str | None:
        """The class that plays the rows; None = rows are questions of one turn."""
        return self._settings.factory

    @property
    def factory_settings(self) -> dict[str, Any]:
        """Keywords of that class."""
        return self._settings.factory_settings

    @property
    def has_answers(self) -> bool:
        """Whether rows have a reference answer, and so a score."""
        return self._settings.answer is not None

    @property
    def describes_answers(self) -> bool:
        """Whether the column of answers has tests, patterns or schemas in place of answers."""
        return _scorer(self._settings) in FORMS

    @property
    def counts(self) -> tuple[int, int, int]:
        """Numbers of training rows, held-out rows, and rows left out as held out elsewhere."""
        training, held_out = len(self._training), len(self._held_out)
        left_out = len(self._rows) - training - (0 if self._settings.holds_out_rows else held_out)
        return training, held_out, left_out

    def describe(self) -> str:
        """Return settings and numbers of rows; the hash of a run has the files' contents."""
        settings = sorted(self._settings.model_dump(exclude={"path", "held_out"}).items())
        return f"dataset of {len(self._training)} + {len(self._held_out)} rows {settings!r}"

    def _held_out_row(self, index: int) -> Row:
        if not self._held_out:
            raise SettingsError(
                f"run.environment_settings.path must leave some held-out rows, got none of "
                f"{len(self._rows)}; name a file with other rows as held_out, or set "
                "run.eval_episodes to 0"
            )
        return self._held_out_rows[self._held_out[index % len(self._held_out)]]

    def _divide(self) -> tuple[Sequence[int], Sequence[int]]:
        """Read every row, and return the numbers of training rows and of held-out rows."""
        settings = self._settings
        if not settings.holds_out_rows:
            sides = array("Q"), array("Q")
            for number, question in enumerate(self._questions(self._rows, settings.path)):
                sides[is_held_out(question)].append(number)
            return sides
        path, split = settings.held_out or settings.path, settings.held_out_split or settings.split
        self._held_out_rows = open_rows(path, subset=settings.subset, split=split)
        held_out = set(map(_digest, self._questions(self._held_out_rows, path)))
        training = array("Q")  # without the questions of evaluation
        for number, question in enumerate(self._questions(self._rows, settings.path)):
            if _digest(question) not in held_out:
                training.append(number)
        return training, range(len(self._held_out_rows))

    def _questions(self, rows: Rows, path: str) -> Iterator[str]:
        """Check every row, and yield its question.

        Raises:
            SettingsError: Names the first row that cannot be asked or scored.
        """
        settings = self._settings
        self._check_prompt()
        wanted = _columns_named(settings.prompt)
        wanted |= _columns_named(settings.answer) if settings.answer else set()
        filled_in = columns_in(settings.prompt) | columns_in(settings.answer or "")
        for number, row in enumerate(rows, 1):
            if not wanted <= row.keys():
                _check_columns(wanted, row, number, path)
            for column in filled_in:
                _check_text(column_at(row, column), column, number, path)
            prompt = prompt_of(row, settings)
            if not prompt or not isinstance(prompt, (str, Sequence)):
                raise SettingsError(
                    f"row {number} of {path} must have a text or messages to ask, got "
                    f"{quoted(prompt, 60)}; mend that row, or name the column of the question in "
                    "prompt"
                )
            if settings.answer is not None:
                self._check_reference(reference_of(row, settings), number, path)
            what = f"{settings.prompt} of row {number} of {path}"
            yield identity_of(row, prompt, settings, what)

    def _check_prompt(self) -> None:
        """Refuse a prompt with the column of the answer; tests and patterns may be in a prompt."""
        settings = self._settings
        told = columns_in(settings.prompt) & (
            _columns_named(settings.answer) if settings.answer else set()
        )
        if told and _scorer(settings) not in FORMS:
            name = min(told)
            raise SettingsError(
                f"run.environment_settings.prompt must not have the column of the answer, got "
                f"{{{name}}}; double the braces, {{{{{name}}}}}, to show them to the model, or "
                f"copy the column under another name if it belongs to the question"
            )

    def _check_reference(self, reference: Any, number: int, path: str) -> None:
        column = self._settings.answer
        if reference is None or reference == "":
            raise SettingsError(
                f"row {number} of {path} must have an answer in {column}, got none; write one "
                "there, or leave the row out"
            )
        plain = (str, int, float, *STRUCTURED.get(_scorer(self._settings), ()))
        if not isinstance(reference, plain):
            raise SettingsError(
                f"{column} of row {number} of {path} must be a text or a number, got "
                f"{quoted(reference, 60)}; name a field inside it as answer, such as "
                f"{column}.{'0' if isinstance(reference, list) else 'ground_truth'}, "
                f"or write the answer as one text into a column of its own"
            )
        try:
            self._scorer("", reference)
        except ValueError as error:
            raise SettingsError(
                f"{column} of row {number} of {path} {error}; mend that row, or choose another "
                "scorer"
            ) from None

    def _shuffle(self, turn: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        key = hashlib.blake2b(f"{self._settings.seed} {turn}".encode(), digest_size=8).digest()
        generator = np.random.Generator(np.random.PCG64(int.from_bytes(key, "little")))
        return generator.permutation(len(self._training))


def prompt_of(row: Row, settings: DatasetSettings) -> GivenPrompt:
    """Return the prompt of a row: a column, or a text with columns in it."""
    prompt: GivenPrompt = _fill_column(settings.prompt, row)
    return prompt


def reference_of(row: Row, settings: DatasetSettings) -> Any:
    """Return what an answer to a row is compared with, in the same way; None = nothing."""
    return None if settings.answer is None else _fill_column(settings.answer, row)


def identity_of(
    row: Row, prompt: GivenPrompt, settings: DatasetSettings, what: str = "the prompt of a row"
) -> str:
    """Return what is asked: the question without case; the whole row, where a class plays it."""
    if settings.factory is not None:
        return json.dumps(row, sort_keys=True, default=str)
    return text_of(read_prompt(prompt, what)).casefold()


def _fill_column(column: str, row: Row) -> Any:
    if columns_in(column):
        return fill_in(column, lambda named: str(column_at(row, named)))
    return column_at(row, column)


def _check_columns(wanted: frozenset[str], row: Row, number: int, path: str) -> None:
    missing = [name for name in sorted(wanted) if not _has_column(row, name)]
    if not missing:
        return
    inside = [
        ", ".join(f"{column}.{key}" for key in value) if isinstance(value, dict) else column
        for column, value in row.items()
    ]
    raise SettingsError(
        f"run.environment_settings must name columns of {path}, got {', '.join(missing)}; "
        f"row {number} has {', '.join(inside)}: name one of these"
    )


def _has_column(row: Row, name: str) -> bool:
    try:
        column_at(row, name)
    except KeyError:
        return False
    return True


def _check_text(value: Any, column: str, number: int, path: str) -> None:
    """Refuse a value that would stand in the text as a Python literal."""
    if isinstance(value, (str, int, float)):
        return
    inside = "0" if isinstance(value, list) else next(iter(value or ()), "key")
    raise SettingsError(
        f"{{{column}}} of row {number} of {path} must be a text or a number, got "
        f"{quoted(value, 60)}; write a text there, or name a field inside it, such "
        f"as {{{column}.{inside}}}"
    )


def _columns_named(named: str) -> frozenset[str]:
    return columns_in(named) or frozenset((named,))


def _scorer(settings: DatasetSettings) -> str:
    return settings.scorer or "exact"


def _answer_form(settings: DatasetSettings) -> str:
    if settings.answer_format is not None or settings.answer is None:
        return settings.answer_format or ""
    return FORMS.get(_scorer(settings), FORMAT)


def _digest(question: str) -> bytes:
    return hashlib.blake2b(question.encode(), digest_size=16).digest()
