"""Machine-made mutants: that they are the changes that they are called, and small."""

from __future__ import annotations

import ast

import pytest

from .explained import EXPLAINED
from .lua_mutants import lua_mutants
from .mutant import Mutant
from .python_mutants import python_mutants
from .report import interval
from .targets import ROOT, all_mutants

LUA = """\
local function keep(a, b) return math.max(a, -b) end
if x <= 10 and not done then -- a note: 1 < 2
  call('SET', key, 'a < b')
  count = count + 1
end
"""

PYTHON = '''\
"""Say 1 < 2."""
def keep(a: int, b: int = 3) -> int:
    if a < b and not b:
        log.info("kept", count=1)
        raise KeyError(f"{a + 1}")
    total = max(a, b)
    store.items[a] = total - 1
    return total
'''


@pytest.fixture(scope="module")
def made() -> list[tuple[Mutant, str]]:
    """All mutants, each with the text of its file."""
    mutants = [mutant for mutant, _ in all_mutants()]
    sources = {file: (ROOT / file).read_text() for file in {mutant.file for mutant in mutants}}
    return [(mutant, sources[mutant.file]) for mutant in mutants]


def changes(mutants: list[Mutant], source: str) -> set[tuple[str, str]]:
    return {(mutant.kind, mutant.new_line(source)) for mutant in mutants}


def test_a_lua_script_is_changed_in_its_code_alone() -> None:
    assert changes(list(lua_mutants("x.lua", LUA)), LUA) == {
        ("operator", "local function keep(a, b) return math.min(a, -b) end"),
        ("comparison", "if x < 10 and not done then -- a note: 1 < 2"),
        ("constant", "if x <= 11 and not done then -- a note: 1 < 2"),
        ("operator", "if x <= 10 or not done then -- a note: 1 < 2"),
        ("operator", "if x <= 10 and  done then -- a note: 1 < 2"),
        ("dropped line", ""),
        ("swapped arguments", "call('SET', 'a < b', key)"),
        ("operator", "count = count - 1"),
        ("constant", "count = count + 2"),
    }


def test_a_python_module_is_changed_in_its_code_alone() -> None:
    assert changes(list(python_mutants("x.py", PYTHON)), PYTHON) == {
        ("constant", "def keep(a: int, b: int = 4) -> int:"),
        ("comparison", "if a <= b and not b:"),
        ("operator", "if a < b or not b:"),
        ("operator", "if a < b and b:"),
        ("dropped line", ""),
        ("operator", "total = min(a, b)"),
        ("swapped arguments", "total = max(b, a)"),
        ("operator", "store.items[a] = total + 1"),
        ("constant", "store.items[a] = total - 2"),
    }


def test_every_file_has_mutants_and_each_changes_it(made: list[tuple[Mutant, str]]) -> None:
    for mutant, source in made:
        changed = mutant.apply(source)
        assert changed != source
        if mutant.file.endswith(".py"):
            ast.parse(changed)
    places = [mutant[:4] for mutant, _ in made]
    assert len(places) == len(set(places)) > 1500
    files = {mutant.file for mutant, _ in made}
    assert {file.split("/")[0] for file in files} == {"broker", "buffer", "configs", "learner"}


def test_no_explanation_outlives_its_line(made: list[tuple[Mutant, str]]) -> None:
    lines = {(m.file, m.old_line(source), m.new_line(source)) for m, source in made}
    for explained in EXPLAINED:
        assert explained[:3] in lines, f"nothing makes {explained}"
        assert len(explained.reason) > 20


@pytest.mark.parametrize(
    ("hits", "of", "low", "high"),
    [(0, 0, 0.0, 1.0), (0, 100, 0.0, 0.037), (5, 100, 0.0215, 0.1118)],
)
def test_the_interval_of_a_share(hits: int, of: int, low: float, high: float) -> None:
    assert interval(hits, of) == pytest.approx((low, high), abs=5e-4)
