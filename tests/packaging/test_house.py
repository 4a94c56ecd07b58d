"""The shape of the source: folders that fit on a screen, no import circles, titles that name."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("configs", "buffer", "broker", "actors", "learner", "console")

MAX_MODULES = 15
MAX_TEST_MODULES = 20
MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 320

QUESTIONS = {"What", "Who", "Whose", "Whether", "Why", "How", "Where", "When", "Which"}


def sources(*folders: str) -> list[Path]:
    """Python files below these folders, sorted."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


def modules_by_folder(*folders: str) -> Mapping[str, int]:
    """Count modules beside each other; a package's `__init__` is not one of them."""
    return Counter(shown(p.parent) for p in sources(*folders) if p.name != "__init__.py")


def test_no_source_folder_holds_more_modules_than_fit_on_a_screen():
    counts = modules_by_folder(*ROOMS, "benchmarks")

    assert {f: n for f, n in counts.items() if n > MAX_MODULES} == {}


def test_no_test_folder_holds_more_than_twenty_modules():
    counts = modules_by_folder("tests")

    assert {f: n for f, n in counts.items() if n > MAX_TEST_MODULES} == {}


def test_what_several_tests_use_lies_in_their_support():
    found = [
        f"{shown(path)}: {line}"
        for path in sources("tests")
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.startswith("from tests.") and ".test_" in line
    ]

    assert found == []


def test_no_function_is_longer_than_a_page():
    lengths = {
        f"{shown(path)}:{node.name}": node.end_lineno - node.lineno + 1
        for path in sources(*ROOMS)
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno
    }

    assert {name: n for name, n in lengths.items() if n > MAX_FUNCTION_LINES} == {}


def test_no_file_is_longer_than_its_one_idea_needs():
    lengths = {shown(p): len(p.read_text(encoding="utf-8").splitlines()) for p in sources(*ROOMS)}

    assert {name: n for name, n in lengths.items() if n > MAX_FILE_LINES} == {}


def test_every_module_has_a_title_and_none_is_a_question():
    titles = {shown(p): ast.get_docstring(parsed(p)) or "" for p in sources(*ROOMS, "benchmarks")}

    wrong = {name: title for name, title in titles.items() if first_word(title) in {"", *QUESTIONS}}
    assert wrong == {}


def first_word(title: str) -> str:
    return title.split(maxsplit=1)[0].rstrip(",:;") if title else ""


def module_name(path: Path) -> str:
    return shown(path).removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def imports_of(path: Path) -> Iterator[str]:
    """Name what a module imports anywhere in it, under TYPE_CHECKING and in functions too."""
    name = module_name(path)
    package = name if is_package(path) else name.rpartition(".")[0]
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*(above if node.level else ()), *filter(None, [node.module])])
            yield from (f"{base}.{alias.name}" for alias in node.names)
            yield base


def test_no_import_runs_in_a_circle_not_even_for_types():
    modules = {module_name(path): path for path in sources(*ROOMS)}
    graph = {
        name: {target for target in imports_of(path) if target in modules} - {name}
        for name, path in modules.items()
    }
    # A package is imported before what is in it, but names nothing that its modules wait for.
    graph = {name: found for name, found in graph.items() if not is_package(modules[name])}

    try:
        TopologicalSorter(graph).prepare()
    except CycleError as circle:
        pytest.fail(" -> ".join(circle.args[1]))


def is_package(path: Path) -> bool:
    return path.name == "__init__.py"


def test_no_main_module_gives_work_to_processes():
    """A spawned process does not import `package.__main__`, and would not find the function."""
    pools = {"multiprocessing", "concurrent.futures.ProcessPoolExecutor"}
    mains = [path for path in sources(*ROOMS, "benchmarks", "tests") if path.stem == "__main__"]

    assert [shown(path) for path in mains if pools & {*imports_of(path)}] == []
