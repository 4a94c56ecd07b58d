"""Scorer `code`: programs in completions, the shapes of tests, and verdicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from actors.environments.dataset.environment import Dataset
from actors.environments.dataset.programs import (
    Called,
    CodeScorer,
    Printed,
    program_of,
    read_tests,
    same_output,
)
from actors.sandbox.sandbox import Limits, Sandbox
from configs.errors import SettingsError

SQUARE = "print(int(input()) ** 2)"
DOUBLE = "def f(x):\n    return 2 * x"
STACK = """
class Stack:
    def __init__(self): self.items = []
    def push(self, x): self.items.append(x)
"""
PLAIN = "{1: {2, 3}, 'k': (None, True, b'x', 1.5), 2: [frozenset({1}), 10**5000]}"


@pytest.fixture(scope="module")
def scorer() -> CodeScorer:
    return CodeScorer(Sandbox.find(), Limits(time_s=2, wall_s=10))


def fenced(code: str) -> str:
    return f"<think>```python\nprint(1)\n```</think>\nHere it is:\n```python\n{code}\n```\nDone."


@pytest.mark.parametrize(
    ("text", "program"),
    [
        (fenced(SQUARE), SQUARE + "\n"),
        ("```python\na\n```\nand better\n```python\nb\n```\nprints\n```\n4\n```", "b\n"),
        ("```\nprint(4)\n```", "print(4)\n"),
        ("```Python\nprint(4)", "print(4)"),
        ("<think>```python\nprint(1)\n```", None),
        ("print(4)", None),
    ],
)
def test_the_last_block_of_python_is_the_program(text: str, program: str | None) -> None:
    assert program_of(text) == program


PAIRS = [{"input": "3", "output": "9\n"}, {"input": "-2", "output": "4"}]
COLUMNS = {"inputs": ["3", "-2"], "outputs": ["9", "4"]}
CALLS = {"inputs": [[3], [0]], "outputs": [6, 0], "fn_name": "f"}


CASES: list[tuple[Any, str]] = [
    (PAIRS, SQUARE),
    (json.dumps(PAIRS), SQUARE),
    (COLUMNS, SQUARE),
    (CALLS, DOUBLE),
    (CALLS, "class Solution:\n    def f(self, x):\n        return x + x"),
    ({"inputs": ["[1]\n2"], "outputs": ["[1, 2]"], "fn_name": "f"}, "def f(a, b): return (*a, b)"),
    ([{"fn_name": "f", "input": [[2]], "output": [2, 2]}], "def f(a): return a * 2"),
    ("print('checking')\nassert f(3) == 6", "print('loading')\n" + DOUBLE),
    (["assert f(3) == 6", "assert f('a') == 'aa'", "assert f((1,)) == (1, 1)"], DOUBLE),
    ("def check(g):\n    assert g(2) == 4\ncheck(f)", DOUBLE),
    ("from solution import f\ndef test_f():\n    assert f(2) == 4", DOUBLE),
    ("assert math.isclose(f(0.1), 0.2) and isinstance(f(1), int)", "import math\n" + DOUBLE),
    ("try:\n    f(None)\nexcept TypeError:\n    pass\nelse:\n    assert False", DOUBLE),
    ("s = Stack()\ns.push(1)\nassert s.items == [1]", STACK),
    ("assert list(f(3)) == [0, 1, 2]", "def f(n): yield from range(n)"),
    (f"assert f() == {PLAIN}", f"def f(): return {PLAIN}"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("tests", "code"), CASES)
def test_tests_of_every_shape_pass_and_fail(scorer: CodeScorer, tests: Any, code: str) -> None:
    assert scorer(fenced(code), tests) == 1.0
    assert scorer(fenced("def f(*_): return 'nonsense'"), tests) == 0.0


@pytest.mark.parametrize("end", ["exit()", "quit()", "exit(0)", "raise SystemExit"])
def test_a_right_program_may_end_itself(scorer: CodeScorer, end: str) -> None:
    assert scorer(fenced(f"{SQUARE}\n{end}"), PAIRS) == 1.0
    assert scorer(fenced(f"{SQUARE}\nexit(1)"), PAIRS) == 0.0


def test_a_completion_without_a_program_is_unparsed(scorer: CodeScorer) -> None:
    assert scorer("I do not know", PAIRS) is None


@pytest.mark.parametrize(
    ("got", "wanted", "same"),
    [
        ("1 2\n3\n", "1 2 3", True),
        ("0.33333334", "0.3333333", True),
        ("1e3", "1000.0", True),
        ("1", "1.0", True),
        ("nan", "0.5", False),
        ("1000001", "1000000", False),
        ("Yes", "YES", False),
        ("1 2", "1 2 3", False),
        ("", "", True),
    ],
)
def test_outputs_are_compared_word_by_word(got: str, wanted: str, same: bool) -> None:
    assert same_output(got.encode(), wanted) is same


@pytest.mark.parametrize(
    ("tests", "answer"),
    [
        ("", "must assert something"),
        ("4 +", "must be a list of"),
        ([], "must be a list of|must assert"),
        ([{"input": "1"}], "must be a list of"),
        ({"inputs": ["1"], "outputs": []}, "must be a list of"),
        (7, "must be a list of"),
        ("def check(f):\n    assert f(1) == 2", r"is called behind it, as in answer: .\{test\}"),
        ("import pytest\nassert f(1) == 2", "must import only the standard library, got pytest"),
        ({"inputs": ["[1"], "outputs": ["1"], "fn_name": "f"}, "must have JSON in texts of calls"),
    ],
)
def test_a_row_without_tests_that_can_fail_is_refused(tests: Any, answer: str) -> None:
    with pytest.raises(ValueError, match=answer):
        read_tests(tests)


def test_shapes_are_two() -> None:
    assert isinstance(read_tests(PAIRS), Printed)
    assert isinstance(read_tests(CALLS), Called)


def test_a_row_asks_for_a_program_and_its_answer_may_be_several_columns(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"Double it ({i}).", "test": "def check(g): assert g(2) == 4", "entry": "f"}
        for i in range(30)
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    dataset = Dataset(path=str(path), answer="{test}\ncheck({entry})", scorer="code")
    conversation = dataset.begin(0, 1, held_out=False)

    conversation.step(fenced(DOUBLE))

    assert "```python" in str(conversation.prompt)
    assert conversation.score().parts == {"exact": 1.0}
    assert conversation.demonstration == ()
    with pytest.raises(SettingsError, match=r"must name columns of .* got tset"):
        Dataset(path=str(path), answer="{tset}", scorer="code")
    with pytest.raises(SettingsError, match=r"row 1 of .*must assert something when it is run"):
        Dataset(path=str(path), answer="test", scorer="code")
