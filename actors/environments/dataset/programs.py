"""Scorer `code`: the program of a completion, run against the tests of its row in a sandbox.

    Python in the last fenced block --stdin and stdout, or calls--> 1 if every test holds, 0 if not

Texts that a program prints are compared here, and results of calls in a process that the program
cannot reach: a program never sees the expected results.
"""

from __future__ import annotations

import ast
import json
import math
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from actors.environments.final_answer import fenced_blocks, without_thinking
from actors.sandbox.sandbox import Limits, Sandbox
from configs.errors import quoted

FORM = "Write the program in Python, in one block that begins with ```python and ends with ```."
"""Sentence that tells a model how to answer."""

NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?")
CLOSE = 1e-6  # relative and absolute, where the expected number has a fraction
ALL_TESTS_S = 24.0  # of one completion: less than an actor's default limit of a step
SPARE_BYTES = 1 << 16  # that a program may print beyond twice what is expected
SHAPES = (
    'a list of {"input": …, "output": …}, {"inputs": […], "outputs": […]}, with "fn_name" for '
    "calls of a function, or Python code that asserts"
)


@dataclass(frozen=True, slots=True)
class Printed:
    """Tests of what a program prints."""

    cases: tuple[tuple[str, str], ...]
    """Standard input, and the output expected of it."""


@dataclass(frozen=True, slots=True)
class Called:
    """Tests that call what a program defines."""

    role: str
    """`tests` for code that asserts, `calls` for arguments with results."""
    source: str


class CodeScorer:
    """Scores completions; called with a completion and the value of a row's column of answers."""

    def __init__(self, sandbox: Sandbox, limits: Limits) -> None:
        """Use a sandbox that was checked."""
        self._sandbox = sandbox
        self._limits = limits

    def __call__(self, text: str, reference: Any) -> float | None:
        """Return 1 where all tests hold, 0 where one does not, None without a program.

        Tests that are not over after 24 s, or after the limit of one if that is longer, fail.

        Raises:
            ValueError: The reference has no tests.
            RewardError: The system cannot start a process.
        """
        tests = read_tests(reference)
        program = program_of(text)
        if program is None:
            return None
        if isinstance(tests, Called):
            return float(self._sandbox.passes(program, tests.role, tests.source, self._limits))
        return float(all(self._verdicts(program, tests)))

    def _verdicts(self, program: str, tests: Printed) -> Iterator[bool]:
        deadline = time.monotonic() + max(ALL_TESTS_S, self._limits.wall_s)
        for stdin, wanted in tests.cases:
            most = 2 * len(wanted.encode()) + SPARE_BYTES
            left = min(self._limits.wall_s, deadline - time.monotonic())
            limits = replace(self._limits, output_bytes=most, wall_s=left)
            outcome = self._sandbox.run(program, stdin.encode(), limits)
            yield outcome.status == 0 and same_output(outcome.output, wanted)


def program_of(text: str) -> str | None:
    """Return the last block of Python in a completion, else the last block; None without one."""
    blocks = list(fenced_blocks(without_thinking(text)))
    python = [code for name, code, _ in blocks if name.lower() in ("python", "py", "python3")]
    programs = python or [code for _, code, _ in blocks]
    return programs[-1] if programs else None


def read_tests(reference: Any) -> Printed | Called:
    """Read the tests of a row.

    Raises:
        ValueError: The tests have none of the known shapes. The text completes "the column … of
            row n".
    """
    if isinstance(reference, str):
        try:
            reference = json.loads(reference)
        except ValueError:
            return _code(reference)
    if isinstance(reference, list) and all(isinstance(item, str) for item in reference):
        return _code("\n".join(reference))
    try:
        inputs, outputs, function = _cases(reference)
    except (KeyError, TypeError, AttributeError):
        inputs, outputs, function = [], [], None
    if not inputs or len(inputs) != len(outputs):
        raise ValueError(f"must be {SHAPES}, got {quoted(reference, 60)}")
    if function is None:
        return Printed(tuple((_text(a), _text(b)) for a, b in zip(inputs, outputs, strict=True)))
    try:
        cases = [_call(a, b) for a, b in zip(inputs, outputs, strict=True)]
    except ValueError as error:
        raise ValueError(
            f"must have JSON in texts of calls, got {quoted(inputs[0], 60)}: {error}"
        ) from None
    return Called("calls", json.dumps({"function": function, "cases": cases}))


def same_output(got: bytes, wanted: str) -> bool:
    """Whether two outputs have the same words; numbers with a fraction agree to a millionth.

    White space between words does not count, as with judges of contests.
    """
    words, expected = got.decode(errors="replace").split(), wanted.split()
    return len(words) == len(expected) and all(map(_same_word, words, expected))


def _same_word(word: str, wanted: str) -> bool:
    if word == wanted:
        return True
    if "." not in wanted or not (NUMBER.fullmatch(word) and NUMBER.fullmatch(wanted)):
        return False
    return math.isclose(float(word), float(wanted), rel_tol=CLOSE, abs_tol=CLOSE)


def _cases(reference: Any) -> tuple[list[Any], list[Any], str | None]:
    if isinstance(reference, dict):
        return reference["inputs"], reference["outputs"], reference.get("fn_name")
    functions = {item.get("fn_name") for item in reference}
    (function,) = functions if len(functions) == 1 else (None,)
    return [i["input"] for i in reference], [i["output"] for i in reference], function


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _call(arguments: Any, result: Any) -> tuple[Any, Any]:
    """Return arguments and result of a call; texts have JSON, one argument a line."""
    if not isinstance(arguments, str):
        return arguments, result
    values = [json.loads(line) for line in arguments.splitlines()]
    return values, json.loads(result) if isinstance(result, str) else result


def _code(source: str) -> Called:
    """Check test code: one that asserts nothing, or cannot run, would pass or fail everything."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"must be {SHAPES}, got {quoted(source, 60)}: {error}") from None
    definitions = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assign)
    runs = [node for node in tree.body if not isinstance(node, definitions)]
    tests = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")]
    if not any(isinstance(node, ast.Assert) for node in ast.walk(tree)) or not (runs or tests):
        raise ValueError(
            f"must assert something when it is run, got {quoted(source, 60)} (a function that "
            f"checks is "
            'called behind it, as in answer: "{test}\\ncheck({entry_point})")'
        )
    missing = sorted(_imports(tree) - sys.stdlib_module_names - {"solution"})
    if missing:
        raise ValueError(f"must import only the standard library, got {', '.join(missing)}")
    return Called("tests", source)


def _imports(tree: ast.Module) -> set[str]:
    names = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").partition(".")[0])
    return names
