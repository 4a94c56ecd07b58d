"""The job group for SkyPilot brings its machines all that hub and actors need, and no more.

`tests/system/fleet/skypilot.py` runs its commands for real and asks SkyPilot's own client.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from configs.errors import SettingsError
from configs.settings import Settings
from console.verbs.fleet import render
from tests.console.support.skypilot_group import Document, Group, problems, rendered, started

Change = Callable[[Group], object]
HUB, ACTOR = "hub", "actor-1"


def settings(**tables: dict[str, object]) -> Settings:
    run = {"name": "far.1", "model": "Qwen/Qwen3-0.6B", "environment": "calculator"}
    usual = {"fleet": {"min_actors": 2}, "learner": {"ranks": 4}}
    return Settings.model_validate({"run": run, **usual, **tables})


@pytest.fixture
def group(tmp_path: Path) -> Group:
    return rendered(tmp_path / "out", settings())


def resources(group: Group, task: str) -> Document:
    found: Document = group.tasks[task]["resources"]
    return found


def recovery(group: Group, task: str) -> Document:
    found: Document = resources(group, task)["job_recovery"]
    return found


def without_file(task: str, name: str) -> Change:
    return lambda group: group.tasks[task]["file_mounts"].pop(f"~/nyala/{name}")


def with_file(task: str, name: str) -> Change:
    return lambda group: group.tasks[task]["file_mounts"].update(
        {f"~/{name}": str(group.folder / "keys" / name)}
    )


def replaced(task: str, old: str, new: str = "") -> Change:
    def change(group: Group) -> None:
        assert old in group.tasks[task]["run"]
        group.tasks[task]["run"] = group.tasks[task]["run"].replace(old, new)

    return change


MUTANTS: list[tuple[str, Change]] = [
    ("the tasks would run", lambda g: g.header.update(execution="serial")),
    ("the group must end", lambda g: g.header.pop("primary_tasks")),
    ("the group must end", lambda g: g.header.update(primary_tasks=[HUB, ACTOR])),
    ("actors have no time", lambda g: g.header.pop("termination_delay")),
    ("actors have no time", lambda g: g.header.update(termination_delay="29s")),
    ("SkyPilot refuses the name", lambda g: g.header.update(name="nyala-far.1")),
    ("the number of actors", lambda g: g.tasks.pop(ACTOR)),
    ("actor-1: all nodes", lambda g: g.tasks[ACTOR].update(num_nodes=2)),
    ("hub: spot is", lambda g: resources(g, HUB).update(use_spot=True)),
    ("actor-1: spot is", lambda g: resources(g, ACTOR).pop("use_spot")),
    ("actor-1: another region", lambda g: recovery(g, ACTOR).pop("strategy")),
    ("hub: an error is never", lambda g: recovery(g, HUB).pop("max_restarts_on_errors")),
    ("hub: an error is never", lambda g: recovery(g, HUB).update(max_restarts_on_errors=999)),
    ("actor-1: exit codes", lambda g: recovery(g, ACTOR).update(recover_on_exit_codes=[4])),
    ("actor-1: SkyPilot says", lambda g: recovery(g, ACTOR).update(max_restart_on_errors=1)),
    ("actor-1: exit codes", lambda g: recovery(g, ACTOR).pop("recover_on_exit_codes")),
    ("hub: it needs 4 cards", lambda g: resources(g, HUB).update(accelerators="H100:1")),
    ("actor-1: it needs 1 cards", lambda g: resources(g, ACTOR).pop("accelerators")),
    ("hub: there is no checkout", lambda g: g.tasks[HUB].pop("workdir")),
    (
        "hub: SkyPilot leaves out",
        lambda g: g.tasks[HUB]["file_mounts"].update({"~/k": str(g.folder / "keys")}),
    ),
    ("actor-1: it has no business with broker.key", with_file(ACTOR, "broker.key")),
    ("actor-1: it has no business with checkpoint.key", with_file(ACTOR, "checkpoint.key")),
    ("hub: it has no business with enrolment.key", with_file(HUB, "enrolment.key")),
    ("the commands fail", with_file(HUB, "x.pub")),
    ("the commands fail", without_file(HUB, "keys/checkpoint.key")),
    ("the commands fail", lambda g: g.tasks[ACTOR].update(setup="true")),
    ("the commands fail", lambda g: g.tasks[HUB].update(run="true")),
    ("hub: .*config.yaml", without_file(HUB, "config.yaml")),
    ("hub: .*learner.key must be a key", without_file(HUB, "keys/learner.key")),
    ("hub: .*broker.key must be readable by its owner", replaced(HUB, "umask 077")),
    ("hub: it must be `nyala up`", replaced(HUB, " --plain")),
    ("hub: it starts actors", replaced(HUB, "actors.count=0", "actors.count=1")),
    ("hub: it writes where", replaced(HUB, "run.directory=$HOME/", "run.directory=/tmp/")),
    ("hub: .*readable by its owner", replaced(HUB, "keys=$keys", "keys=$HOME/nyala/keys")),
    (
        "hub: the next machine would refuse",
        replaced(HUB, "checkpoint.key $run", "checkpoint.key ~"),
    ),
    ("hub: no actor may register", replaced(HUB, "$keys.new/allowed/enrolment\n", "$keys.new\n")),
    ("actor-0: its broker is told", replaced(HUB, "--set broker.advertise=$hub:5757")),
    ("actor-0: nobody publishes", replaced(HUB, "--set learner.advertise=$hub:5758")),
    ("actor-0: nobody publishes", replaced(HUB, "$hub:5758", "$hub:5757")),
    ("actor-0: nobody listens", replaced(HUB, "tcp://0.0.0.0:5757", "tcp://127.0.0.1:5757")),
    ("actor-1: nobody listens", replaced(ACTOR, "tcp://hub-0", "tcp://hub")),
    ("actor-1: .*enrolment.key must be", without_file(ACTOR, "keys/enrolment.key")),
    ("actor-1: .*broker.pub must be", without_file(ACTOR, "keys/broker.pub")),
    ("actor-1: .*readable by its owner", replaced(ACTOR, "umask 077")),
    ("actor-1: it must be `nyala actor`", replaced(ACTOR, "./run actor", "./run up")),
    ("actor-1: one that was told", replaced(ACTOR, "exit_when_told=75", "exit_when_told=0")),
    ("actor-1: it writes where", replaced(ACTOR, "run.directory=$HOME/", "run.directory=/tmp/")),
]


def test_nothing_is_wrong_with_the_group(group: Group, tmp_path: Path) -> None:
    assert problems(group, tmp_path / "machines") == []

    more = settings(
        actors={"count": 3, "drain_s": 120.5, "tensor_parallel_size": 2}, fleet={"min_actors": 1}
    )
    others = rendered(tmp_path / "more", more)
    assert problems(others, tmp_path / "others") == []
    assert list(others.tasks) == [HUB, "actor-0", "actor-1", "actor-2"]


@pytest.mark.parametrize("number", range(len(MUTANTS)))
def test_each_mistake_in_such_a_file_is_found(group: Group, tmp_path: Path, number: int) -> None:
    answer, change = MUTANTS[number]
    change(group)

    found = problems(group, tmp_path / "machines")

    assert [text for text in found if re.match(answer, text)], found


def test_a_hub_that_starts_again_on_its_machine_lets_no_revoked_key_in(
    group: Group, tmp_path: Path
) -> None:
    started(group.tasks[HUB], group, tmp_path / "hub")
    (enrolment,) = (
        tmp_path / "hub" / "nyala" / "runs" / "keys" / "allowed" / "enrolment"
    ).iterdir()
    enrolment.unlink()  # as a revocation does

    started(group.tasks[HUB], group, tmp_path / "hub")

    assert not enrolment.exists()


def test_rendering_again_keeps_the_keys(group: Group) -> None:
    before = {path: path.read_bytes() for path in (group.folder / "keys").glob("*.key")}

    rendered(group.folder, settings(fleet={"min_actors": 5}))

    assert {path: path.read_bytes() for path in (group.folder / "keys").glob("*.key")} == before
    assert len(before) == 4


def test_what_machines_of_skypilot_cannot_have_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Settings.model_validate({"run": {"model": "init"}})
    with pytest.raises(
        SettingsError, match=r"run\.model must be .* on SkyPilot, got init; .*init-m"
    ):
        render(made, "skypilot", tmp_path / "out")
    monkeypatch.setattr("console.verbs.fleet.CHECKOUT", tmp_path)
    with pytest.raises(SettingsError, match="must be given a checkout of Nyala, got an installed"):
        render(settings(), "skypilot", tmp_path / "out")
    assert not (tmp_path / "out").exists()
