"""The documents name what is there: the tree, files, presets, settings and benchmarks."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from benchmarks.journeys import JOURNEYS, Tree, missing_steps, steps_of
from configs.loader import load

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
ROOMS = (
    "configs",
    "buffer",
    "broker",
    "actors",
    "agents",
    "learner",
    "console",
    "lab",
    "benchmarks",
)
LEAVES = ("tests", "docs", "requirements")  # whose inside the tree does not draw
LINE = re.compile(r"^(?P<branch>[├└]── )?(?P<name>[a-z_]+)/ +\S")


def tracked() -> set[str]:
    done = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return {name for name in done.stdout.splitlines() if (ROOT / name).exists()}


def drawn_tree() -> set[str]:
    """Folders in the tree of the contributors' page, each with a comment."""
    text = (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```\w*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    (tree,) = [block for block in blocks if block.startswith("configs/")]
    folders, room = set[str](), ""
    for line in tree.splitlines():
        match = LINE.match(line)
        assert match, f"a folder and a comment must be on this line of the tree: {line!r}"
        room = room if match["branch"] else match["name"]
        folders.add(f"{room}/{match['name']}" if match["branch"] else room)
    return folders


def test_the_tree_that_is_drawn_is_the_tree_on_disk():
    files = [name.split("/") for name in tracked()]
    top = {parts[0] for parts in files if parts[0] in (*ROOMS, *LEAVES)}
    inside = {f"{p[0]}/{p[1]}" for p in files if len(p) > 2 and p[0] in ROOMS}

    assert drawn_tree() == top | inside


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_exists(page):
    text = page.read_text(encoding="utf-8")
    top = "|".join((*ROOMS, *LEAVES))
    named = set(re.findall(rf"(?<![\w/.{{<])((?:{top})/[\w./-]*\w)", text))
    paths = {name for name in named if not (ROOT / name).exists()}

    assert paths == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_module_that_a_page_runs_exists(page):
    text = page.read_text(encoding="utf-8")
    modules = re.findall(r"-m ((?:benchmarks|tests|actors|agents|broker|learner)[\w.]*\w)", text)

    for module in modules:
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_test_that_a_page_names_exists(page):
    sources = "\n".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")
    )
    named = set(re.findall(r"`(test_[a-z0-9_]+)`", page.read_text(encoding="utf-8")))

    assert {name for name in named if f"def {name}(" not in sources} == set()


@pytest.mark.parametrize("preset", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_preset_loads(preset):
    assert load(preset).run.name


def test_every_benchmark_is_run_by_a_command_that_a_page_names():
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    programs = {path.parent.name for path in (ROOT / "benchmarks").glob("*/__main__.py")}
    programs |= {path.stem for path in (ROOT / "benchmarks").glob("[a-z]*.py")}

    assert {name for name in programs if f"-m benchmarks.{name}" not in text} == set()


def test_every_page_is_in_the_index():
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    linked = re.findall(r"\]\(([\w-]+\.md)\)", text)

    assert sorted(linked) == sorted(page.name for page in PAGES[1:] if page.name != "index.md")


def test_every_step_of_the_guided_tours_is_there():
    tree = Tree.of_checkout()

    assert missing_steps(tree) == []
    assert [s.place for name in JOURNEYS for s in steps_of(name) if not s.words] == []


def test_a_step_that_has_gone_is_missing_from_its_tour():
    files = dict(Tree.of_checkout().files)
    files["learner/loop.py"] = files["learner/loop.py"].replace("def _publish(", "def _put_out(")
    del files["buffer/lua/batches/seal.lua"]

    assert missing_steps(Tree(files)) == [
        "episode: buffer/lua/batches/seal.lua",
        "weight_version: learner.loop:Loop._publish",
    ]


def test_a_tour_of_an_older_tree_finds_a_step_in_a_part_of_its_chapter_or_by_its_name_alone():
    part = "class Room:\n    pass\n"
    old = Tree({"actors/capacity/room.py": part, "learner/elsewhere.py": "def pack():\n    pass\n"})

    steps = ("actors.capacity:ConcurrencyLimit", "learner.data.batch:pack")
    found = [old.find_before(step) for step in steps]
    assert found == [("actors/capacity/room.py", 1), ("learner/elsewhere.py", 1)]
    assert old.find_before("learner.data.batch:plan_batch") is None
