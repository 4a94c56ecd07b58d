r"""Process of the scorer `math-verify`: `python -P -m actors.environments.dataset.math_worker`.

    a line of JSON {"gold", "answer", "is_marked"} --> a line: true, false, or null for no answer

One thread alone, as math-verify's time limits need it: they are signals. What they do not end, the
scorer ends with the process (`mathematics.py`).
"""

from __future__ import annotations

import json
import os
import resource
import sys
from typing import Any

from math_verify import parse, verify

STEP_S = 2  # of parsing, and of comparing
DELIMITERS = ("$", "\\boxed", "\\(", "\\[")


def judge(gold: str, answer: str, *, is_marked: bool) -> bool | None:
    """Compare an answer with the reference.

    Args:
        gold: The reference, LaTeX or plain.
        answer: A final answer alone, or all of a completion.
        is_marked: It is a final answer alone.

    Returns:
        None: there is nothing in the answer that can be read.

    Raises:
        ValueError: Nothing in the reference can be read.
    """
    wanted = read(gold)
    if not wanted:
        raise ValueError(f"must be mathematics, got {gold!r:.60}")
    given = read(answer) if is_marked else parse(answer, parsing_timeout=STEP_S)
    return bool(verify(wanted, given, timeout_seconds=STEP_S)) if given else None


def read(text: str) -> list[Any]:
    """Parse an expression that stands alone, with or without the signs that begin LaTeX."""
    found: list[Any] = []
    if any(sign in text for sign in DELIMITERS):
        found = parse(text, parsing_timeout=STEP_S)
    return found or parse(f"\\boxed{{{text}}}", parsing_timeout=STEP_S)


def main() -> None:
    """Answer until the input ends, as it does with the actor."""
    memory = int(sys.argv[1]) << 20
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no reply
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            verdict: bool | str | None = judge(**asked)
        except ValueError as error:
            verdict = str(error)
        except Exception:  # noqa: BLE001 - of sympy, on an odd answer: it is no right one
            verdict = None
        print(json.dumps(verdict), file=replies, flush=True)


if __name__ == "__main__":
    main()
