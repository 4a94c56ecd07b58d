"""Rewriting of imports of modules that have moved."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.packaging.moved_modules import (
    MOVED,
    NAMES,
    NAMES_OF_MODULES,
    PARTS,
    RENAMED,
    main,
    rewritten,
    unresolved,
)

ROOT = Path(__file__).parents[2]


def is_there(module: str) -> bool:
    path = ROOT / module.replace(".", "/")
    return path.with_suffix(".py").exists()


def test_every_chapter_is_there_and_nothing_is_left_at_an_old_place():
    assert [new for new in PARTS if not is_there(new)] == []
    assert [old for old in MOVED if old not in PARTS and is_there(old)] == []


def test_every_name_that_was_renamed_is_there():
    gone = {
        f"{MOVED[module]}.{new}"
        for (module, _), new in RENAMED.items()
        if new not in (ROOT / (MOVED[module].replace(".", "/") + ".py")).read_text("utf-8")
    }

    assert gone == set()


def test_every_other_name_of_a_module_is_there_and_the_name_before_is_gone():
    def has(module: str, name: str) -> bool:
        text = (ROOT / module.replace(".", "/")).with_suffix(".py").read_text("utf-8")
        return bool(re.search(rf"^(?:class |(?:async )?def )?{name}\b", text, re.MULTILINE))

    assert len(NAMES) == len(NAMES_OF_MODULES.split("\n")) - 2, "each line is read"
    assert [(module, new) for (module, _), new in NAMES.items() if not has(module, new)] == []
    assert [name for name in NAMES if has(*name)] == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "from actors.engine.rows.draws import own_draws  # noqa: X - torch",
            "from actors.engine.torch_engine import own_draws  # noqa: X - torch",
        ),
        (
            "from configs.fleet import wanted\n\nwanted.first()",
            "from configs import fleet\n\nfleet.first()",
        ),
        (
            "from configs.fleet import wanted\n\nfleet = wanted.first()",
            "from configs import fleet as wanted\n\nfleet = wanted.first()",
        ),
        (
            "from console.doctor import packages\n\nassert packages.GROUP",
            "from console.doctor import machine\n\nassert machine.PACKAGES",
        ),
        (
            "from console.doctor.packages import GROUP as G",
            "from console.doctor.machine import PACKAGES as G",
        ),
        (
            "def f():\n    from buffer.record import schema, episode\n    return schema.A, episode",
            "def f():\n    from buffer.record import wire, episode\n    return wire.A, episode",
        ),
        (
            "import learner.launch.nodes\n\nlearner.launch.nodes.Nodes()",
            "import learner.launch\n\nlearner.launch.Nodes()",
        ),
        (
            "setattr('console.run.placement.environment_of', 1)",
            "setattr('console.run.plan.environment_of', 1)",
        ),
        (
            "from learner.launch import Meeting, Nodes\n\nx: Meeting = Meeting()",
            "from learner.launch import Rendezvous, Nodes\n\nx: Rendezvous = Rendezvous()",
        ),
        (
            "from actors.capacity.room import Room\n\nprint(f'{Room(3)}')",
            "from actors.capacity import ConcurrencyLimit\n\nprint(f'{ConcurrencyLimit(3)}')",
        ),
        (
            "from actors.capacity import Room\n\nConcurrencyLimit = Room(3)",
            "from actors.capacity import ConcurrencyLimit as Room\n\nConcurrencyLimit = Room(3)",
        ),
        (
            "from actors.capacity import Room as Limit\n\nLimit(Room)",
            "from actors.capacity import ConcurrencyLimit as Limit\n\nLimit(Room)",
        ),
        (
            "from actors import capacity, loop\n\nloop.unless(capacity.Room(3))",
            "from actors import capacity, loop\n\nloop.until_event(capacity.ConcurrencyLimit(3))",
        ),
        (
            "import actors.loop\n\nactors.loop.unless('actors.capacity.Room')",
            "import actors.loop\n\nactors.loop.until_event('actors.capacity.ConcurrencyLimit')",
        ),
        ("from elsewhere import Room\n\nRoom(3)", "from elsewhere import Room\n\nRoom(3)"),
        ("'console.chaos.command:app'", "'lab.command:app'"),
        ("x = settings.learner.components", "x = settings.learner.components"),
        ("import numpy\nfrom os.path import join", "import numpy\nfrom os.path import join"),
    ],
)
def test_a_file_of_python_names_the_new_places(before, after):
    assert rewritten(before, python=True) == after
    assert rewritten(after, python=True) == after


def test_a_text_names_the_new_places():
    text = (
        "Run `python -m console.chaos.endurance.lying_actor`; see `learner/launch/nodes.py` and "
        "`actors.capacity.Room`.\n"
    )

    after = (
        "Run `python -m lab.endurance.lying_actor`; see `learner/launch.py` and "
        "`actors.capacity.ConcurrencyLimit`.\n"
    )
    assert rewritten(text, python=False) == after


def test_tests_of_a_module_stay_where_they_are():
    text = "`tests/learner/launch/test_nodes.py` tests `learner/launch/nodes.py`"

    after = "`tests/learner/launch/test_nodes.py` tests `learner/launch.py`"
    assert rewritten(text, python=False) == after


def test_a_folder_of_a_user_is_rewritten_and_checked(tmp_path, capsys):
    program = tmp_path / "deep" / "program.py"
    program.parent.mkdir()
    program.write_text(
        "from configs.fleet.wanted import first_wanted\nfrom buffer.nowhere import Thing\n"
    )

    assert main(["--check", str(tmp_path)]) == 1
    assert main([str(tmp_path)]) == 0
    assert [line.partition(": ")[2] for line in unresolved(program)] == ["buffer.nowhere.Thing"]

    program.write_text(program.read_text().splitlines()[0])
    assert main(["--check", str(tmp_path)]) == 0
    assert "every import resolves" in capsys.readouterr().out


@pytest.mark.slow
def test_no_file_of_ours_imports_from_an_old_place():
    folders = ("configs", "buffer", "broker", "actors", "learner", "console", "lab", "benchmarks")
    paths = [p for folder in (*folders, "tests") for p in (ROOT / folder).rglob("*.py")]

    assert [line for path in paths for line in unresolved(path)] == []
