"""Machine-made mutants: that they are the changes that they are called, and small."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from .explained import EXPLAINED
from .lua_mutants import lua_mutants
from .mutant import Mutant
from .python_mutants import python_mutants
from .report import interval
from .results import Key, Results, by_key, in_random_order
from .targets import ROOT, TARGETS, Target, all_mutants
from .trial import Trial, workplace

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
        store.put(a, b)
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
        ("swapped arguments", "store.put(b, a)"),
        ("operator", "store.items[a] = total + 1"),
        ("constant", "store.items[a] = total - 2"),
    }


@pytest.mark.slow
def test_every_file_has_mutants_and_each_changes_it(made: list[tuple[Mutant, str]]) -> None:
    for mutant, source in made:
        changed = mutant.apply(source)
        assert changed != source
        if mutant.file.endswith(".py"):
            ast.parse(changed)
    places = [mutant[:4] for mutant, _ in made]
    assert len(places) == len(set(places)) > 1500
    files = {ROOT / mutant.file for mutant, _ in made}
    for pattern in (pattern for target in TARGETS for pattern in target.files):
        assert files.intersection(ROOT.glob(pattern)), f"no mutant of {pattern}"


@pytest.mark.slow
def test_no_explanation_outlives_its_line(made: list[tuple[Mutant, str]]) -> None:
    lines = {(m.file, m.old_line(source), m.new_line(source)) for m, source in made}
    assert len({explained[:3] for explained in EXPLAINED}) == len(EXPLAINED)
    for explained in EXPLAINED:
        assert explained[:3] in lines, f"nothing makes {explained}"
        assert len(explained.reason) > 20


@pytest.mark.parametrize(
    ("hits", "of", "low", "high"),
    [(0, 0, 0.0, 1.0), (0, 100, 0.0, 0.037), (5, 100, 0.0215, 0.1118)],
)
def test_the_interval_of_a_share(hits: int, of: int, low: float, high: float) -> None:
    assert interval(hits, of) == pytest.approx((low, high), abs=5e-4)


def test_results_hold_when_lines_move_and_the_next_run_goes_on(tmp_path: Path) -> None:
    mutant, target = next(all_mutants())
    twin = mutant._replace(kind="constant", new=mutant.new)
    keys = list(by_key([(mutant, target), (twin, target)]))
    assert [key.nth for key in keys] == [0, 1]

    results = Results(tmp_path / "done.jsonl")
    results.add(keys[0], Trial(mutant, "killed", 2.04))

    again = Results(tmp_path / "done.jsonl")
    moved = mutant._replace(start=mutant.start + 1000)
    assert again.trial(keys[0], moved) == Trial(moved, "killed", 2.0)
    assert keys[0] in again and keys[1] not in again


def test_a_mutant_more_leaves_the_order_of_the_others(made: list[tuple[Mutant, str]]) -> None:
    keys = [Key("x.py", f"line {i}", "", 0) for i in range(50)]

    order = in_random_order(keys, seed=1)

    assert order != keys and order != in_random_order(keys, seed=2)
    assert in_random_order(keys[1:], seed=1) == [key for key in order if key != keys[0]]


STAGES = (("test_a.py", "-k", "not slow"), ("test_a.py", "test_b.py"))
A = """
import pathlib
from product import double
def test_double(): assert double(2) == 4
def test_slow(): pathlib.Path("slow").open("a").write(".")
"""
B = """
import pathlib
from product import double
def test_flaky():
    busy = pathlib.Path("busy")
    if busy.exists():
        busy.unlink()
        raise AssertionError
def test_more(): assert double(3) == 6
"""


@pytest.mark.slow
def test_a_trial_runs_each_test_once_and_leaves_nothing_behind(tmp_path: Path) -> None:
    product = "def double(x):\n    return 2 * x\n"
    for name, text in {"product": product, "test_a": A, "test_b": B}.items():
        (tmp_path / f"{name}.py").write_text(text)
    with workplace(tmp_path) as place:
        target = Target(("product.py",), STAGES)
        at = product.index("2 * x")

        def outcome(new: str) -> str:
            mutant = Mutant("product.py", at, at + len("2 * x"), new, "operator")
            return place.try_mutant(mutant, target).outcome

        assert outcome("2 + x") == "killed"  # by the second stage: 2 + 2 is 4
        (tmp_path / "busy").touch()
        assert outcome("x + x") == "survived"  # of a failure that does not repeat, too
        assert outcome("3 * x") == "killed"
        assert outcome("(") == "killed"
    assert (tmp_path / "product.py").read_text() == product
    assert not (tmp_path / "busy").exists()
    assert (tmp_path / "slow").read_text() == "." * 4


@pytest.mark.slow
def test_a_mutant_that_does_not_end_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    text = (
        "import pathlib, subprocess\n"
        "def test():\n"
        "    with subprocess.Popen(['sleep', '3600'], start_new_session=True) as sleeper:\n"
        "        pathlib.Path('pid').write_text(str(sleeper.pid))\n"
    )
    (tmp_path / "test_a.py").write_text(text)
    with workplace(tmp_path) as place:
        assert place.run(("test_a.py",), timeout_s=4.0).code is None
        assert place.run(("test_a.py", "-k", "none"), timeout_s=60.0).has_passed
        pid = (tmp_path / "pid").read_text()
        assert not Path(f"/proc/{pid}").exists()
