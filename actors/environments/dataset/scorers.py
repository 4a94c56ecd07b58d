"""Scorers of final answers, by the name in `environment_settings.scorer`.

Each compares one candidate (`final_answer.py`) with the reference: 1 = right, 0 = wrong, None = the
candidate cannot be read as such an answer. A reference that no answer can be compared with raises
`ValueError`. Comparisons that may never end run in a process of their own: programs
(`programs.py`), and mathematics and the user's patterns (`answer_process.py`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from functools import partial
from importlib import metadata
from typing import Any

from actors.environments.answer_process import AnswerScorer
from actors.environments.final_answer import candidates, fenced_blocks
from actors.numbers import stated_number, unwrapped
from actors.sandbox.sandbox import Limits, Sandbox
from configs.errors import SettingsError, quoted
from configs.machine import install_command

from .programs import CodeScorer

LETTER = re.compile(r"\W*([A-Za-z])(?:\W*|[).:\]]+\s.*)", re.DOTALL)
CLOSE = 1e-6  # relative: 0.333333 is a third
OLDEST_MATH = (0, 9)  # of math-verify
LASTING = 3  # a program may last so many times its CPU time: others run beside it

Scorer = Callable[[str, Any], float | None]


def make_scorer(name: str, *, time_s: float, memory_mb: int) -> Scorer:
    """Return what scores whole completions.

    It is called with a completion and a reference, and returns 1, 0, or None for a completion that
    cannot be read. It raises `ValueError` for a reference that no answer can be compared with: the
    text completes "the column ... of row n".

    Args:
        name: Name of the scorer, as in the settings.
        time_s: CPU time of a program of `code` in one test.
        memory_mb: Memory of such a program.

    Raises:
        SettingsError: The scorer cannot work on this machine.
    """
    if name == "code":
        return CodeScorer(Sandbox.find(), Limits(time_s, LASTING * time_s + 1, memory_mb))
    if name == "math-verify":
        _check_math_verify()
        return AnswerScorer(name, _check_mathematics)
    if name in ("regex", "json_schema"):
        return AnswerScorer(name, partial(SCORERS[name], ""))
    return lambda text, reference: score_of(text, reference, SCORERS[name])


def score_of(text: str, reference: Any, scorer: Scorer) -> float | None:
    """Score a completion by the best candidate for its final answer.

    For `numeric` and `choice` the first candidate that can be read counts, the most explicit first.

    Returns:
        None: No candidate can be read.

    Raises:
        ValueError: As `scorer` raises it for the reference.
    """
    if not text:
        return scorer("", reference)
    answers = candidates(text)
    if scorer in (numeric, choice):  # a completion that names several is not right by one of them
        answers = (*answers[2:], *answers[:2])
        scores = (scorer(candidate, reference) for candidate in answers)
        return next((score for score in scores if score is not None), None)
    scores = (scorer(candidate, reference) for candidate in answers)
    return max((score for score in scores if score is not None), default=None)


def exact(candidate: str, reference: Any) -> float | None:
    """Compare texts, without regard to case, spaces and a full stop at the end."""
    return float(_plain(candidate) == _plain(str(reference))) if candidate.strip() else None


def numeric(candidate: str, reference: Any) -> float | None:
    """Compare to a millionth the number that each side states, such as `18` in `#### $18`."""
    wanted = stated_number(str(reference))
    if wanted is None:
        raise ValueError(
            f"must have a number, got {quoted(reference, 60)} (scorer: math-verify compares "
            f"expressions)"
        )
    number = stated_number(candidate)
    if number is None:
        return None
    same = {number, number / 100} if candidate.rstrip(" .$}").endswith("%") else {number}
    return float(any(math.isclose(value, wanted, rel_tol=CLOSE, abs_tol=1e-12) for value in same))


def choice(candidate: str, reference: Any) -> float | None:
    """Compare letters: `b`, `(B)` and `B. Paris` are equal."""
    wanted = LETTER.fullmatch(unwrapped(str(reference)))
    if wanted is None:
        raise ValueError(f"must be a letter, got {quoted(reference, 60)}")
    letter = LETTER.fullmatch(unwrapped(candidate))
    return None if letter is None else float(letter[1].casefold() == wanted[1].casefold())


def regex(candidate: str, reference: Any) -> float | None:
    """Match the whole answer with the reference, a regular expression."""
    try:
        pattern = re.compile(str(reference))
    except re.error as error:
        raise ValueError(
            f"must be a regular expression, got {quoted(reference, 60)}: {error}"
        ) from None
    return float(pattern.fullmatch(candidate.strip()) is not None) if candidate.strip() else None


def json_schema(candidate: str, reference: Any) -> float | None:
    """Check JSON, bare or in a fenced block, against the reference, a JSON schema."""
    from jsonschema import Draft202012Validator  # noqa: PLC0415 - of the extra `data`
    from jsonschema.exceptions import SchemaError  # noqa: PLC0415 - of the extra `data`

    try:
        schema = json.loads(reference) if isinstance(reference, str) else reference
        Draft202012Validator.check_schema(schema)
    except (ValueError, SchemaError) as error:
        raise ValueError(
            f"must be a JSON schema, got {quoted(reference, 60)}: {error!s:.80}"
        ) from None
    blocks = fenced_blocks(candidate)
    fenced = [text for name, text, closed in blocks if closed and name.lower() in ("", "json")]
    try:
        value = json.loads(fenced[-1] if fenced else candidate)
    except (ValueError, RecursionError):
        return None
    return float(Draft202012Validator(schema).is_valid(value))


SCORERS: dict[str, Scorer] = {
    "exact": exact,
    "numeric": numeric,
    "choice": choice,
    "regex": regex,
    "json_schema": json_schema,
}


def _check_math_verify() -> None:
    """Refuse a machine without the package, or with one that is too old."""
    try:
        installed = metadata.version("math-verify")
    except metadata.PackageNotFoundError:
        installed = "none"
    if tuple(map(int, re.findall(r"\d+", installed)[:2])) < OLDEST_MATH:
        raise SettingsError(
            f"scorer: math-verify must have math-verify >= {'.'.join(map(str, OLDEST_MATH))}, got "
            f"{installed}; install the extra `math`: {install_command('math')}"
        )


def _check_mathematics(reference: Any) -> None:
    if not str(reference).strip():
        raise ValueError("must be mathematics, got nothing")


def _plain(text: str) -> str:
    return " ".join(unwrapped(text).casefold().split()).removesuffix(".")
