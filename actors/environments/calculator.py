"""Environment of two turns with a tool: the policy may use a calculator before it answers.

    prompt        7+8*3=
    turn 1        [8*3]          the call; a turn without brackets is already the answer
    observation   24;            masked out of the loss; `?;` after a malformed expression
    turn 2        31             the answer

Settings: `max_operand`, `dense` (credit for a useful call and by position), `seed`.
"""

from __future__ import annotations

from functools import lru_cache
from random import Random
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from .base import Score, Segment, Step, item_on_side
from .final_answer import position_share

# --------------------------------------------------------------------------------------------------
# Calculator of `+`, `-`, `*` and parentheses over integers, bounded in time and size.
#
# Grammar:
#     sum     = product (("+" | "-") product)*
#     product = factor ("*" factor)*
#     factor  = digits | "-" factor | "(" sum ")"

MAX_CHARACTERS = 64  # bounds depth and time of the descent
MAX_DIGITS = 12  # bounds the size of factors


class ArithmeticSyntaxError(ValueError):
    """The text is not an expression of this calculator."""


def evaluate(text: str) -> int:
    """Return the value of an expression.

    Raises:
        ArithmeticSyntaxError: The text is not an expression, or too long.

    Example:
        >>> evaluate("7+8*3")
        31
    """
    if len(text) > MAX_CHARACTERS:
        raise ArithmeticSyntaxError(f"at most {MAX_CHARACTERS} characters, got {len(text)}")
    value, end = _sum(text, 0)
    if end != len(text):
        raise ArithmeticSyntaxError(f"unexpected {text[end]!r} at {end}")
    return value


def _sum(text: str, at: int) -> tuple[int, int]:
    value, at = _product(text, at)
    while at < len(text) and text[at] in "+-":
        right, end = _product(text, at + 1)
        value, at = (value + right if text[at] == "+" else value - right), end
    return value, at


def _product(text: str, at: int) -> tuple[int, int]:
    value, at = _factor(text, at)
    while at < len(text) and text[at] == "*":
        right, at = _factor(text, at + 1)
        value *= right
    return value, at


def _factor(text: str, at: int) -> tuple[int, int]:
    if text[at : at + 1] == "-":
        value, end = _factor(text, at + 1)
        return -value, end
    if text[at : at + 1] == "(":
        value, end = _sum(text, at + 1)
        if text[end : end + 1] != ")":
            raise ArithmeticSyntaxError(f"missing ')' at {end}")
        return value, end + 1
    end = at
    while end < len(text) and text[end] in "0123456789":
        end += 1
    if not 0 < end - at <= MAX_DIGITS:
        raise ArithmeticSyntaxError(f"a number of 1 to {MAX_DIGITS} digits expected at {at}")
    return int(text[at:end]), end


# --------------------------------------------------------------------------------------------------
# Environment of two turns with a tool: the policy may use a calculator before it answers.

ITEMS = 1 << 30  # numbers of questions; questions repeat long before
CACHED_QUESTIONS = 4096


class CalculatorSettings(BaseModel):
    """`run.environment_settings` of this environment."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    max_operand: int = Field(default=9, ge=2, le=999)
    dense: bool = False
    """Reward = half of `exact` + a quarter each for a useful call and for the position share."""
    seed: int = Field(default=0, ge=0, lt=1 << 30)
    """Questions of another seed are others."""


class Question(NamedTuple):
    """A question, and the part of it that is hard without the tool."""

    text: str
    product: str


class CalculatorConversation:
    """One question: a call, the result of the calculator, an answer."""

    def __init__(self, question: Question, *, dense: bool) -> None:
        self._question = question
        self._dense = dense
        self._result: int | None = None
        self._called = False
        self._final: str | None = None

    @property
    def prompt(self) -> str:
        """The question, ending in `=`."""
        return self._question.text + "="

    @property
    def answer(self) -> str:
        """The value of the question."""
        return str(evaluate(self._question.text))

    @property
    def demonstration(self) -> tuple[Segment, ...]:
        """The product is calculated first, then the answer is given."""
        product = self._question.product
        return (
            Segment(f"[{product}]", trained=True),
            Segment(f"{evaluate(product)};", trained=False),
            Segment(self.answer, trained=True),
        )

    def step(self, text: str) -> Step:
        """Answer a first call with its value; take anything else as the final answer."""
        text = text.strip()
        if self._called or not (text.startswith("[") and text.endswith("]")):
            self._final = text
            return Step()
        self._called = True
        try:
            self._result = evaluate(text[1:-1])
        except ArithmeticSyntaxError:
            return Step("?;", done=False)
        return Step(f"{self._result};", done=False)

    def score(self) -> Score:
        """Judge the final answer, and whether the tool was used.

        The reward is 1 for exactly the reference, else 0; `dense` gives credit for a part.
        """
        final = self._final or ""
        exact = float(final == self.answer)
        useful = float(self._result == evaluate(self._question.product))
        parts = {"exact": exact, "used_tool": float(self._result is not None)}
        if not self._dense:
            return Score(exact, parts)
        share = position_share(final, self.answer)
        return Score(exact / 2 + useful / 4 + share / 4, parts | {"position": share})


class Calculator:
    """Questions such as `7+8*3`, split into training and held-out ones."""

    is_thread_safe = True

    def __init__(self, **settings: Any) -> None:
        self._settings = CalculatorSettings(**settings)
        self._find = lru_cache(CACHED_QUESTIONS)(self._find_question)

    def begin(self, index: int, seed: int, *, held_out: bool) -> CalculatorConversation:  # noqa: ARG002 - an item is its index
        """Make the conversation of an item; members of a group share it, whatever their seeds."""
        return CalculatorConversation(self._find(index, held_out), dense=self._settings.dense)

    def describe(self) -> str:
        """Return name, version and settings."""
        return f"calculator 1 {sorted(self._settings.model_dump().items())!r}"

    def _find_question(self, index: int, held_out: bool) -> Question:
        return item_on_side(
            index, self._make_question, lambda question: question.text, held_out=held_out
        )

    def _make_question(self, number: int) -> Question:
        random = Random((self._settings.seed << 31) + number % ITEMS)
        a, b, c = (random.randint(1, self._settings.max_operand) for _ in range(3))
        product, sign = f"{b}*{c}", random.choice("+-")
        text = f"{a}{sign}{product}" if random.random() < 0.5 else f"{product}{sign}{a}"
        return Question(text, product)
