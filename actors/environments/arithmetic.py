"""Calculator of `+`, `-`, `*` and parentheses over integers, bounded in time and size.

Grammar:
    sum     = product (("+" | "-") product)*
    product = factor ("*" factor)*
    factor  = digits | "-" factor | "(" sum ")"
"""

from __future__ import annotations

MAX_CHARACTERS = 64  # bounds depth and time of the descent
MAX_DIGITS = 12  # bounds the size of what it multiplies


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
