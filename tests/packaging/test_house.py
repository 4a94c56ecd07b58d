"""The shape of the source: chapters and no crumbs, no import circles, titles that name."""

from __future__ import annotations

import ast
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("configs", "buffer", "broker", "actors", "agents", "learner", "console", "lab")

MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 600  # an alarm: two chapters have grown into one file
MIN_MODULES = 4  # fewer are one file, not a folder
MIN_LINES = 80  # below it, a module with one importer beside it is a part of that importer

THIN = {
    "configs/agent": "the agent of the preset agent.yaml, for users to copy",
    "configs/deploy": "deployment files, and the program that a container runs beside its role",
    "console/new_project": "the files that `nyala new` copies",
}
"""Folders that may have fewer modules, each with its reason. The list may only shrink."""
CRUMBS = {
    "actors/environments/hosted/program.py": "a program of its own, in a Python of the user",
}
"""Small modules that may stand beside their importer, each with its reason; it may only shrink."""

QUESTIONS = {"What", "Who", "Whose", "Whether", "Why", "How", "Where", "When", "Which"}


def sources(*folders: str, root: Path = ROOT) -> list[Path]:
    """Python files below these folders, sorted."""
    return sorted(path for folder in folders for path in (root / folder).rglob("*.py"))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def shown(path: Path, root: Path = ROOT) -> str:
    return str(path.relative_to(root))


def modules_by_folder(root: Path) -> Mapping[str, int]:
    """Count modules beside each other; a package's `__init__` is not one of them."""
    return Counter(shown(p.parent, root) for p in sources(*ROOMS, root=root) if not is_package(p))


def thin_folders(root: Path = ROOT) -> dict[str, int]:
    """Folders inside the rooms that have a module, but fewer than make a folder."""
    counts = modules_by_folder(root)
    return {f: n for f, n in counts.items() if n < MIN_MODULES and f not in ROOMS}


def crumbs(root: Path = ROOT) -> dict[str, str]:
    """Small modules that only one module imports, which stands beside them; and that module."""
    modules = {module_name(path, root): path for path in sources(*ROOMS, root=root)}
    importers: dict[str, set[str]] = {name: set() for name in modules}
    for name, path in modules.items():
        for target in {*imports_of(path, root)} & {*modules} - {name}:
            importers[target].add(name)
    return {
        shown(path, root): shown(modules[importer], root)
        for name, path in modules.items()
        if not is_package(path) and num_lines(path) < MIN_LINES and len(importers[name]) == 1
        for importer in importers[name]
        if modules[importer].parent == path.parent
    }


def num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_a_folder_holds_four_modules_or_is_a_file():
    assert set(thin_folders()) == set(THIN)


@pytest.mark.slow
def test_a_small_module_has_a_reason_to_stand_beside_its_only_importer():
    assert set(crumbs()) == set(CRUMBS)


@pytest.fixture
def copy(tmp_path):
    """The sources of a room, to plant things in."""
    shutil.copytree(ROOT / "buffer", tmp_path / "buffer")
    return tmp_path


def test_a_thin_folder_is_found(copy):
    planted = copy / "buffer" / "planted"
    planted.mkdir()
    for name in ("__init__", "one", "two", "three"):
        (planted / f"{name}.py").write_text('"""A module."""\n')

    assert thin_folders(copy) == {"buffer/planted": 3}

    (planted / "four.py").write_text('"""A module."""\n')

    assert thin_folders(copy) == {}


def test_a_crumb_is_found(copy):
    record = copy / "buffer" / "record"
    (record / "crumb.py").write_text('"""Half an idea."""\n\nHALF = 0.5\n')

    assert crumbs(copy) == {}  # nobody imports it: a program

    with (record / "rules.py").open("a") as rules:
        rules.write("\nfrom .crumb import HALF\n")
    parsed.cache_clear()

    assert crumbs(copy) == {"buffer/record/crumb.py": "buffer/record/rules.py"}

    with (copy / "buffer" / "store.py").open("a") as store:
        store.write("\nfrom buffer.record.crumb import HALF\n")
    parsed.cache_clear()

    assert crumbs(copy) == {}  # two modules share it


@pytest.mark.slow
def test_each_folder_lists_its_chapters_by_their_titles():
    wrong = {}
    for path in sources(*ROOMS):
        if not is_package(path):
            continue
        text = " ".join((ast.get_docstring(parsed(path)) or "").split())
        files = {p.stem: p for p in path.parent.glob("*.py") if p != path}
        folders = {f"{p.parent.name}/": p for p in path.parent.glob("*/__init__.py")}
        missing = [
            line
            for name, chapter in sorted((files | folders).items())
            if (line := f"{name} {title_of(chapter)}") not in text
        ]
        listed = re.findall(r"^([\w/]+)  +\S", ast.get_docstring(parsed(path)) or "", re.MULTILINE)
        gone = [name for name in listed if not (path.parent / name).is_dir() and name not in files]
        if missing or gone:
            wrong[shown(path)] = missing + gone

    assert wrong == {}


def title_of(path: Path) -> str:
    """Return the first paragraph of a module's docstring, on one line and without its full stop."""
    paragraph = (ast.get_docstring(parsed(path)) or "").partition("\n\n")[0]
    return " ".join(paragraph.split()).removesuffix(".")


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


def test_no_file_is_longer_than_a_chapter():
    lengths = {shown(path): num_lines(path) for path in sources(*ROOMS)}

    assert {name: n for name, n in lengths.items() if n > MAX_FILE_LINES} == {}


def test_every_module_has_a_title_and_none_is_a_question():
    titles = {shown(p): ast.get_docstring(parsed(p)) or "" for p in sources(*ROOMS, "benchmarks")}

    wrong = {name: title for name, title in titles.items() if first_word(title) in {"", *QUESTIONS}}
    assert wrong == {}


def first_word(title: str) -> str:
    return title.split(maxsplit=1)[0].rstrip(",:;") if title else ""


def module_name(path: Path, root: Path = ROOT) -> str:
    return shown(path, root).removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def imports_of(path: Path, root: Path = ROOT) -> Iterator[str]:
    """Name what a module imports anywhere in it, under TYPE_CHECKING and in functions too."""
    name = module_name(path, root)
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
