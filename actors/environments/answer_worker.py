r"""Process that compares answers: `python -P -m actors.environments.answer_worker SCORER MEMORY`.

    a line of JSON {"text", "reference"} --> a line: 1, 0, null for no answer, or a text that says
                                             what is wrong with the reference

The first line is null: all that takes long is imported. An answer has a limit of CPU time, at which
the system ends the process (`answer_process.py` starts another). One thread alone.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import lru_cache
from typing import Any

from actors.environments.dataset.scorers import SCORERS, score_of
from actors.environments.final_answer import marked_answer, without_thinking
from actors.numbers import read_number
from configs.errors import quoted

FORMULA_CPU_S = 2.0  # so that sixteen without an end, on two cores, fit in the limit of a turn
CPU_S = {"math-verify": FORMULA_CPU_S, "reasoning_gym": 15.0}  # which makes the item first
PATTERN_CPU_S = 1.0  # a pattern that takes longer takes hours
IMPORTED = {"math-verify": "math_verify", "json_schema": "jsonschema", "reasoning_gym": "sympy"}
LONGEST = 1 << 14  # characters of a completion that mathematics is looked for in, from its end
DELIMITERS = ("$", "\\boxed", "\\(", "\\[")
NO_LIMIT: Any = None  # of the library itself: this process has one
CLOSE = 1e-9  # relative: expressions are exact


def compare_mathematics(text: str, reference: Any) -> float | None:
    """Compare the final answer of a completion with a reference by its value, as math-verify does.

    Returns:
        1 or 0; None where the answer has no mathematics that can be parsed.

    Raises:
        ValueError: The reference has none.
    """
    from math_verify import parse, verify  # noqa: PLC0415 - of the extra `math`

    gold = str(reference).strip()
    wanted = _read(gold)
    if not wanted:
        raise ValueError(f"must be mathematics, got {quoted(gold, 60)}")
    marked = marked_answer(text)
    same = None if marked is None else same_number(gold, marked)
    if same is not None:
        return float(same)
    answer = without_thinking(text)[-LONGEST:] if marked is None else marked[:LONGEST]
    if not answer.strip():
        return None
    try:
        parsed = parse(answer, parsing_timeout=NO_LIMIT) if marked is None else _read(answer)
        return float(verify(wanted, parsed, timeout_seconds=NO_LIMIT)) if parsed else None
    except ValueError:  # of the answer, not of the reference
        return None


def same_number(gold: str, answer: str) -> bool | None:
    """Compare numbers, which math-verify misreads: `1e5`, `18 eggs`, `3 1/2`, `3=4`.

    Returns:
        Whether they are equal; False also where the sides of an answer such as `3=4` differ. None
        where one of them is no number, or a percentage, which may mean two numbers.
    """
    sides = [read_number(side) for side in answer.split("=")]
    values = [value for value in sides if value is not None]
    if any(not math.isclose(value, values[0], rel_tol=CLOSE) for value in values[1:]):
        return False
    wanted = read_number(gold)
    if wanted is None or len(values) < len(sides) or "%" in gold + answer:
        return None
    return math.isclose(values[0], wanted, rel_tol=CLOSE)


def _read(text: str) -> list[Any]:
    """Parse an expression that stands alone, with or without the signs that begin LaTeX."""
    from math_verify import parse  # noqa: PLC0415 - of the extra `math`

    expressions: list[Any] = []
    if any(sign in text for sign in DELIMITERS):
        expressions = parse(text, parsing_timeout=NO_LIMIT)
    return expressions or parse(f"\\boxed{{{text}}}", parsing_timeout=NO_LIMIT)


def judge_item(text: str, item: Any) -> dict[str, Any]:
    """Judge the answer to an item of reasoning-gym by the dataset's own scorer.

    Returns:
        The fields of a `Score`.
    """
    asked = _dataset(json.dumps(item["settings"])).begin(
        item["index"], 0, held_out=item["held_out"]
    )
    signal.setitimer(signal.ITIMER_PROF, FORMULA_CPU_S)
    return asdict(asked.judged(text))


@lru_cache(1)
def _dataset(settings: str) -> Any:
    from .reasoning_gym import ReasoningGym  # noqa: PLC0415 - of the extra of that name

    return ReasoningGym(**json.loads(settings))


def scorer_of(name: str) -> Callable[[str, Any], Any]:
    """Return what compares a completion with a reference."""
    if name == "reasoning_gym":
        return judge_item
    if name == "math-verify":
        return compare_mathematics
    return lambda text, reference: score_of(text, reference, SCORERS[name])


def main() -> None:
    """Answer until the input ends, as it does with the actor."""
    name, memory = sys.argv[1], int(sys.argv[2]) << 20
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # texts that libraries print are not replies
    if name in IMPORTED:
        importlib.import_module(IMPORTED[name])
    scorer, limit_s = scorer_of(name), CPU_S.get(name, PATTERN_CPU_S)
    print("null", file=replies, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        try:
            verdict = scorer(asked["text"], asked["reference"])
        except ValueError as error:
            verdict = str(error)
        except Exception:  # noqa: BLE001 - of sympy, on an odd answer, which is a wrong one
            verdict = None
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(verdict), file=replies, flush=True)


if __name__ == "__main__":
    main()
