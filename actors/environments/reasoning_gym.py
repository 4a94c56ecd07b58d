"""Datasets of reasoning-gym as single-turn environments.

Settings: `dataset` (its name), `prompt_style` (`full`, or `compact` where one is written),
`answer_format` (what stands behind a full question), `dense` (credit by position), `size` (training
items before they repeat), `seed`; every further key goes to the dataset. Training and held-out
items come from separate seeds and, by `held_out.py`, never share a question.

Some scorers raise on odd answers: that is a score of 0 and counted as `scorer_errors`. Some
settings make a generator that never returns: items are begun under a deadline
(`actors/episodes/environment_threads.py`).
"""

from __future__ import annotations

import random
import threading
from difflib import get_close_matches
from functools import cached_property, lru_cache
from importlib.metadata import version
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

from configs.errors import SettingsError

from .base import Score, Segment, Step
from .compact import CompactStyle, Item, compact_style
from .final_answer import FORMAT, candidates
from .held_out import probe
from .partial_credit import position_share
from .reasoning_gym_modules import dataset_names, import_dataset

HELD_OUT_SEED = 1 << 31  # above any seed + item number, and within the 32 bits of numpy's seeds
_MAKING = threading.Lock()  # for what is drawn from the one `random` of the process
CACHED_ITEMS = 4096  # more than the groups in flight: members of a group share one item


class ReasoningGymSettings(BaseModel):
    """Our own keys of `run.environment_settings`; the others belong to the dataset."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)

    dataset: str = "spell_backward"
    prompt_style: Literal["full", "compact"] = "full"
    """`full`: the dataset's question, whole. `compact`: a few characters (`compact.py`), for the
    character models that `run.model: init` makes."""
    answer_format: str = FORMAT
    """Tells the model how to answer, behind a full question; empty = nothing does. Answers are
    found in the forms of `final_answer.py`, whatever this is."""
    dense: bool = False
    """Reward = half of the position share + half of `exact`, instead of the dataset's own score."""
    size: int = Field(default=1_000_000, ge=1, lt=1 << 30)
    seed: int = Field(default=0, ge=0, lt=1 << 30)


class _Dataset(Protocol):
    """Interface of a reasoning-gym dataset, as far as it is used."""

    def __getitem__(self, idx: int) -> Item: ...

    def score_answer(self, answer: str | None, entry: Item) -> float: ...


class ReasoningGymConversation:
    """One question, one answer."""

    def __init__(
        self,
        item: Item,
        dataset: _Dataset,
        settings: ReasoningGymSettings,
        style: CompactStyle | None,
    ) -> None:
        self._item = item
        self._dataset = dataset
        self._style = style
        self._dense = settings.dense
        self._format = settings.answer_format
        self._text: str | None = None

    @property
    def prompt(self) -> str:
        """The question, in the chosen style."""
        if self._style:
            return self._style.prompt(self._item)
        question = str(self._item["question"])
        return f"{question.rstrip()}\n\n{self._format}" if self._format else question

    @property
    def answer(self) -> str:
        """The reference answer, in the chosen style."""
        return self._style.answer(self._item) if self._style else str(self._item["answer"])

    @property
    def columns(self) -> dict[str, object]:
        """The whole question and what the dataset knows about it."""
        return {"question": self._item["question"], "metadata": self._item["metadata"]}

    @property
    def demonstration(self) -> tuple[Segment, ...]:
        """The reference answer as the only turn."""
        return (Segment(self.answer, trained=True),)

    def step(self, text: str) -> Step:
        """Take the answer; there is no second turn."""
        self._text = text
        return Step()

    def score(self) -> Score:
        """Judge the final answer by the dataset's own scorer, or densely."""
        scores = [self._judge(text) for text in candidates(self._text or "")]
        return max(scores, key=lambda score: score.reward)

    def _judge(self, text: str) -> Score:
        expanded = self._style.expand(text) if self._style else text
        errors = 0.0
        try:
            score = float(self._dataset.score_answer(expanded, entry=self._item))
        except Exception:  # noqa: BLE001 - any of 100 foreign scorers; an odd answer is a wrong one
            score, errors = 0.0, 1.0
        exact = 1.0 if text == self.answer or score >= 1.0 else 0.0
        parts = {"exact": exact, "score": score}
        reward = score
        if self._dense:
            parts["position"] = position_share(text, self.answer)
            reward = (parts["position"] + exact) / 2
        return Score(reward, parts, {"scorer_errors": errors})


class ReasoningGym:
    """A dataset by name, split into training and held-out items."""

    is_thread_safe = True

    def __init__(self, **settings: Any) -> None:
        self._settings = ReasoningGymSettings(**settings)
        self._extra = dict(self._settings.model_extra or {})
        self._training = self._create(self._settings.seed)
        self._style = (
            compact_style(self._settings.dataset)
            if self._settings.prompt_style == "compact"
            else None
        )
        self._item = lru_cache(CACHED_ITEMS)(self._find)

    @cached_property
    def _held_out(self) -> _Dataset:
        return self._create(self._settings.seed + HELD_OUT_SEED)

    def begin(self, index: int, seed: int, *, held_out: bool) -> ReasoningGymConversation:  # noqa: ARG002 - an item is its index
        """Make the conversation of an item; members of a group share it, whatever their seeds."""
        return ReasoningGymConversation(
            self._item(index, held_out),
            self._held_out if held_out else self._training,
            self._settings,
            self._style,
        )

    def describe(self) -> str:
        """Name, package version and settings."""
        settings = sorted(self._settings.model_dump().items())
        return f"reasoning_gym {version('reasoning-gym')} {settings!r}"

    def _find(self, index: int, held_out: bool) -> Item:
        dataset = self._held_out if held_out else self._training
        size = self._settings.size
        return probe(
            index % size,
            lambda number: _make_item(dataset, number % size),
            self._question,
            held_out=held_out,
        )

    def _question(self, item: Item) -> str:
        # The prompt that the policy reads, without case: `Son>` in training gives `son>` away.
        text = self._style.prompt(item) if self._style else str(item["question"])
        return text.casefold()

    def _create(self, seed: int) -> _Dataset:
        name = self._settings.dataset
        factory = import_dataset(name)
        if name not in factory.DATASETS:
            raise SettingsError(
                "run.environment_settings.dataset must be a dataset of reasoning-gym, "
                f"got {name!r}; {_similar(name, dataset_names())}"
            )
        try:
            dataset: _Dataset = factory.create_dataset(
                name, seed=seed, size=self._settings.size, **self._extra
            )
        except (TypeError, ValueError, AssertionError, AttributeError) as error:
            raise SettingsError(
                f"run.environment_settings must be valid for reasoning-gym's {name}, "
                f"got {self._extra}; it says: {error}"
            ) from error
        return dataset


def _make_item(dataset: _Dataset, number: int) -> Item:
    """Make an item that depends on its number alone: list_functions also draws from `random`."""
    with _MAKING:
        state = random.getstate()
        random.seed(number)
        try:
            return dataset[number]
        finally:
            random.setstate(state)


def _similar(name: str, known: list[str]) -> str:
    close = get_close_matches(name, known, n=3)
    return f"did you mean {' or '.join(close)}?" if close else "names are in its GALLERY.md"
