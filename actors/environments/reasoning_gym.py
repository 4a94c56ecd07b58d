"""Datasets of reasoning-gym as single-turn environments.

Settings: `dataset` (its name), `prompt_style` (`full`, or `compact` where one is written),
`answer_format` (what stands behind a full question), `dense` (credit by position), `size` (training
items before they repeat), `seed`; every further key goes to the dataset. Training and held-out
items come from separate seeds and, by `base.py`, never share a question.

Some scorers evaluate what the policy wrote. Those that take a list get literals alone, and those
that take a formula get formulas alone, in a process with a limit of CPU time (`answer_process.py`).
Some scorers raise on odd answers: that is a score of 0 and counted as `scorer_errors`. Some
settings make a generator that never returns: items are begun under a deadline
(`actors/episodes/environment_workers.py`).
"""

from __future__ import annotations

import ast
import importlib
import random
import re
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from functools import cache, cached_property, lru_cache, partial
from importlib.metadata import requires, version
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from threading import RLock
from types import ModuleType
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

from configs.errors import SettingsError

from .answer_process import AnswerScorer
from .base import Score, Segment, Step, item_on_side
from .final_answer import FORMAT, candidates, position_share

# --------------------------------------------------------------------------------------------------
# Import of a single dataset of reasoning-gym.
#
# The package's own `__init__` imports all of its hundred datasets, and with them sympy. Here it and
# the packages of its subjects stay unexecuted until something is looked up in them that is not one
# of their modules, and only the module that registers the wanted dataset is imported. A dataset
# whose module needs names of the whole package takes all of it.
#
# Some dependencies of the package have to be compiled, and the locks leave them out
# (`requirements/datasets.txt`). Only the datasets that import them need them.

PACKAGE = "reasoning_gym"
REGISTERS = re.compile(r'(?:DATASET_NAME\s*=|register_dataset\()\s*"([^"]+)"')
"""A module that registers a dataset, and its name."""
_IMPORTING = RLock()


class _UnexecutedPackage(ModuleType):
    """A package whose `__init__` is executed when one of its names is needed."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in {"__all__", "__version__"}:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if find_spec(f"{self.__name__}.{name}") is not None:
            return importlib.import_module(f"{self.__name__}.{name}")
        _execute(self)
        return getattr(self, name)


def import_dataset(name: str) -> ModuleType:
    """Import the module of the dataset `name`, and return `reasoning_gym.factory`.

    A name that no module registers is missing in the `DATASETS` of the factory afterwards.

    Raises:
        SettingsError: The dataset needs a package that is not installed.
    """
    with _IMPORTING, warnings.catch_warnings():
        # Dependencies of the package warn of their own syntax when they are first compiled.
        warnings.simplefilter("ignore")
        try:
            return _import(name, _find_module(name))
        except ModuleNotFoundError as error:
            raise SettingsError(_lacking(name, error)) from error


def dataset_names() -> list[str]:
    """List all datasets that the sources of the package register."""
    return sorted({name for text in map(_read, _sources()) for name in REGISTERS.findall(text)})


def _import(name: str, module: str | None) -> ModuleType:
    """Import the module that registers a dataset, if one does, and the factory."""
    is_alone = _import_alone(module or f"{PACKAGE}.factory")
    factory = importlib.import_module(f"{PACKAGE}.factory")
    if not is_alone or (module is not None and name not in factory.DATASETS):
        _execute(importlib.import_module(PACKAGE))
    return factory


def _lacking(name: str, error: ModuleNotFoundError) -> str:
    """Write the error of a dataset that needs a package, with the version that it asks for."""
    wanted = [text for text in requires("reasoning-gym") or () if text.startswith(str(error.name))]
    package = wanted[0] if wanted else error.name
    uv = Path(sys.executable).with_name("uv")
    return (
        f"run.environment_settings.dataset must be one whose packages are installed, got {name}, "
        f"which needs {package}; run `{uv} pip install --python {sys.executable} '{package}'`, and "
        "again after each change of the locks (pycosat is compiled: apt install gcc python3-dev)"
    )


def _find_module(name: str) -> str | None:
    """Return the module that registers `name`, or None."""
    # Most files have the name of their dataset: the others are read only if that finds nothing.
    for path in sorted(_sources(), key=lambda path: path.stem != name):
        if name in REGISTERS.findall(_read(path)):
            folder = next(above for above in path.parents if above.name == PACKAGE)
            return ".".join((PACKAGE, *path.relative_to(folder).with_suffix("").parts))
    return None


def _sources() -> list[Path]:
    """List the modules of the package's subjects."""
    spec = find_spec(PACKAGE)
    assert spec is not None, PACKAGE
    assert spec.origin is not None, PACKAGE
    return list(Path(spec.origin).parent.glob("*/**/*.py"))


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _import_alone(module: str) -> bool:
    """Import a module without executing the packages above it; False = the module needs them."""
    _place_parents(module)
    try:
        importlib.import_module(f"{PACKAGE}.coaching")  # first, as everywhere: it imports in a ring
        importlib.import_module(module)
    except ModuleNotFoundError:
        raise
    except ImportError:  # a name that the package's own `__init__` gives it
        return False
    return True


def _place_parents(module: str) -> None:
    """Make the packages above a module without executing them."""
    parts = module.split(".")
    for depth in range(1, len(parts)):
        parent = ".".join(parts[:depth])
        if parent in sys.modules:
            continue
        spec = find_spec(parent)
        assert spec is not None, parent
        package = module_from_spec(spec)
        package.__class__ = _UnexecutedPackage
        sys.modules[parent] = package
        if depth > 1:
            setattr(sys.modules[".".join(parts[: depth - 1])], parts[depth - 1], package)


def _execute(package: ModuleType) -> None:
    """Execute a package and those below it, where that has not been done."""
    below = f"{package.__name__}."
    modules = list(sys.modules.items())
    package_and_below = [package, *(m for name, m in modules if name.startswith(below))]
    unexecuted = [m for m in package_and_below if isinstance(m, _UnexecutedPackage)]
    for module in unexecuted:
        _finish(module)


def _finish(package: ModuleType) -> None:
    package.__class__ = ModuleType
    assert package.__spec__ and package.__spec__.loader, package.__name__
    package.__spec__.loader.exec_module(package)


# --------------------------------------------------------------------------------------------------
# Compact prompts: an item of a reasoning-gym dataset in a handful of characters.
#
# A character model spends most of its time on English questions of some hundred characters. A
# compact style keeps all that the answer depends on, drops the prose, and maps the short answer
# back to the form that the scorer of the dataset expects. Each style is written by hand: no rule
# finds the payload of every dataset.
#
# | dataset | prompt | answer |
# | --- | --- | --- |
# | spell_backward | `abc>` | `cba` |
# | number_sorting | `3,1,2<` ascending, `3,1,2>` descending | `1,2,3` |
# | base_conversion | `101:2>10:` | `5` |
# | caesar_cipher | `IFMMP>` | `HELLO` |
# | count_bits | `13#` | `3` |
# | gcd, lcm | `12,8:` | `4` |
# | letter_counting | `e in the text:` | `2` |
# | word_sorting | `b,a<` or `b,a>` | `a,b` |
# | chain_sum, basic_arithmetic, products | `3+4=` | `7` |

Item = dict[str, Any]
"""An item as reasoning-gym makes it: `question`, `answer`, `metadata`."""


def _same(text: str) -> str:
    return text


@dataclass(frozen=True, slots=True)
class CompactStyle:
    """Short prompts and answers of one dataset."""

    prompt: Callable[[Item], str]
    answer: Callable[[Item], str]
    expand: Callable[[str], str] = _same
    """From a short answer to the form that the dataset's scorer reads."""


def compact_style(dataset: str) -> CompactStyle:
    """Return the style of a dataset.

    Raises:
        SettingsError: The dataset has no compact style.
    """
    try:
        return STYLES[dataset]
    except KeyError:
        raise SettingsError(
            f"run.environment_settings.prompt_style must be full for {dataset}, got compact; leave "
            f"it out, or choose a dataset with short prompts: {', '.join(sorted(STYLES))}"
        ) from None


def _plain_answer(item: Item) -> str:
    return str(item["answer"])


def _number(text: str) -> str:
    """Drop decimals without information: `7.0` is `7`."""
    return text.removesuffix(".0")


def _direction(item: Item) -> str:
    return "<" if item["metadata"]["direction"] == "ascending" else ">"


def _sorting_prompt(item: Item) -> str:
    numbers = item["metadata"]["original_numbers"]
    return ",".join(_number(n) for n in numbers) + _direction(item)


def _sorting_answer(item: Item) -> str:
    return ",".join(_number(n) for n in item["metadata"]["sorted_numbers"])


def _sorting_expand(text: str) -> str:
    return str(text.split(","))


def _conversion_prompt(item: Item) -> str:
    meta = item["metadata"]
    return f"{meta['source_repr']}:{meta['source_base']}>{meta['target_base']}:"


def _words_prompt(item: Item) -> str:
    return ",".join(item["metadata"]["transformed_words"]) + _direction(item)


def _words_answer(item: Item) -> str:
    return ",".join(item["metadata"]["sorted_words"])


def _counting_prompt(item: Item) -> str:
    meta = item["metadata"]
    return f"{meta['target_letter']} {' '.join(meta['span'])}:"


def _numbers_prompt(item: Item) -> str:
    return ",".join(str(n) for n in item["metadata"]["numbers"]) + ":"


def _expression_prompt(item: Item) -> str:
    return str(item["metadata"]["expression"]).replace(" ", "") + "="


_EXPRESSION = CompactStyle(_expression_prompt, _plain_answer)
STYLES = {
    # The scorer ignores case, so a lower-case word halves the alphabet and asks the same thing.
    "spell_backward": CompactStyle(
        lambda item: str(item["metadata"]["word"]).lower() + ">",
        lambda item: str(item["answer"]).lower(),
    ),
    "number_sorting": CompactStyle(_sorting_prompt, _sorting_answer, _sorting_expand),
    "base_conversion": CompactStyle(_conversion_prompt, _plain_answer),
    "caesar_cipher": CompactStyle(
        lambda item: str(item["metadata"]["cipher_text"]) + ">", _plain_answer
    ),
    "count_bits": CompactStyle(lambda item: f"{item['metadata']['number']}#", _plain_answer),
    "gcd": CompactStyle(_numbers_prompt, _plain_answer),
    "lcm": CompactStyle(_numbers_prompt, _plain_answer),
    "letter_counting": CompactStyle(_counting_prompt, _plain_answer),
    "word_sorting": CompactStyle(
        _words_prompt, _words_answer, lambda text: ", ".join(text.split(","))
    ),
    "chain_sum": _EXPRESSION,
    "basic_arithmetic": _EXPRESSION,
    "products": _EXPRESSION,
}


# --------------------------------------------------------------------------------------------------
# Datasets of reasoning-gym as single-turn environments.

HELD_OUT_SEED = 1 << 31  # above any seed + item number, and within the 32 bits of numpy's seeds
_MAKING = threading.Lock()  # for draws from `random`, which the process shares
WORDS = re.compile(r"[A-Za-z]{2,}|\.[ \t\n]*[A-Za-z]")
SIGNS = re.compile(r"[0-9A-Za-z+*/^()., \t\n-]*")
FUNCTIONS = frozenset(
    re.findall(r"\w+", "sin cos tan sec csc cot asin acos atan sinh cosh tanh exp log ln sqrt pi")
)
LONGEST_FORMULA = 1000  # characters
CACHED_ITEMS = 4096  # more than the groups in flight: members of a group share one item


class ReasoningGymSettings(BaseModel):
    """Nyala's keys of `run.environment_settings`; all other keys belong to the dataset."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)

    dataset: str = "spell_backward"
    prompt_style: Literal["full", "compact"] = "full"
    """`full`: the dataset's question, whole. `compact`: a few characters, for the
    character models that `run.model: init` makes."""
    answer_format: str = FORMAT
    """Sentence behind a full question that tells the model how to answer; may be empty. Answers
    are found in the forms of `final_answer.py`, whatever the sentence is."""
    dense: bool = False
    """Reward = half of the position share + half of `exact`, instead of the dataset's own score."""
    size: int = Field(default=1_000_000, ge=1, lt=1 << 30)
    """Items before they repeat."""
    seed: int = Field(default=0, ge=0, lt=1 << 30)
    """Items of another seed are others."""


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
        judge_apart: Callable[[str], Any] | None = None,
    ) -> None:
        """Begin.

        Args:
            item: The item, as the dataset made it.
            dataset: The dataset, which judges answers.
            settings: Settings of the environment.
            style: The form of short prompts; None = the dataset's own questions.
            judge_apart: Judges in another process, where the dataset evaluates formulas; returns
                the fields of a score.
        """
        self._judge_apart = judge_apart
        self._item = item
        self._dataset = dataset
        self._style = style
        self._has_formulas = reads_formulas(dataset)
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
        """The whole question, and the dataset's metadata of the item."""
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
        """Judge the final answer by the dataset's own scorer, or densely.

        A scorer that raises, or whose process reaches its limit of CPU time, gives 0 and counts as
        `scorer_errors`.

        Raises:
            RewardError: The process that judges formulas cannot be started.
        """
        text = self._text or ""
        if self._judge_apart is None:
            return self.judged(text)
        score = self._judge_apart(text) if text else asdict(self.judged(text))
        if not isinstance(score, dict):  # the process ended at its limit of CPU time
            return Score(0.0, {"exact": 0.0, "score": 0.0}, {"scorer_errors": 1.0})
        return Score(**score)

    def judged(self, text: str) -> Score:
        """Judge a completion in this process."""
        scores = [self._judge(text) for text in candidates(text)]
        return max(scores, key=lambda score: score.reward)

    def _judge(self, text: str) -> Score:
        expanded = self._style.expand(text) if self._style else text
        if self._has_formulas and not is_formula(expanded):
            expanded = ""
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
        self._scorer = (
            AnswerScorer("reasoning_gym", str) if reads_formulas(self._training) else None
        )

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
            None
            if self._scorer is None
            else partial(self._judge_in_worker, self._scorer, index, held_out),
        )

    def _judge_in_worker(self, scorer: AnswerScorer, index: int, held_out: bool, text: str) -> Any:
        settings = self._settings.model_dump()
        return scorer.request_verdict(
            text, {"settings": settings, "index": index, "held_out": held_out}
        )

    def describe(self) -> str:
        """Return name, package version and settings."""
        settings = sorted(self._settings.model_dump().items())
        return f"reasoning_gym {version('reasoning-gym')} {settings!r}"

    def _find(self, index: int, held_out: bool) -> Item:
        dataset = self._held_out if held_out else self._training
        size = self._settings.size
        return item_on_side(
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
                f"run.environment_settings must be valid for reasoning-gym's {name}, got "
                f"{self._extra}, refused with: {error}; correct or leave out that key"
            ) from error
        module: Any = sys.modules[type(dataset).__module__]
        if "eval(answer)" in _source_of(dataset):
            module.eval = ast.literal_eval  # in that module alone, which only parses lists
        return dataset


def is_formula(text: str) -> bool:
    """Whether a text has only numbers, variables of one letter, and functions of mathematics.

    Anything else would be Python: sympy evaluates what it parses.
    """
    return (
        len(text) <= LONGEST_FORMULA
        and SIGNS.fullmatch(text) is not None
        and FUNCTIONS.issuperset(WORDS.findall(text))
    )


def reads_formulas(dataset: _Dataset) -> bool:
    """Whether the scorer of a dataset evaluates an answer with sympy."""
    return "parse_expr(answer" in _source_of(dataset)


def _source_of(dataset: _Dataset) -> str:
    return _module_source(str(sys.modules[type(dataset).__module__].__file__))


@cache
def _module_source(path: str) -> str:
    return _read(Path(path))


def _make_item(dataset: _Dataset, number: int) -> Item:
    """Make an item that depends on its number alone: list_functions also draws from `random`."""
    with _MAKING:
        state = random.getstate()
        random.seed(number)
        try:
            return dataset[number]
        finally:
            random.setstate(state)


def _similar(name: str, names: list[str]) -> str:
    close = get_close_matches(name, names, n=3)
    return f"did you mean {' or '.join(close)}?" if close else "names are in its GALLERY.md"
