"""A job group as `nyala fleet render` writes it, what its machines would do, and what is wrong.

A machine is stood in for by a folder: SkyPilot's copies of files, which have lost their modes, and
a checkout whose `./run` writes down how it was called. `tests/system/fleet/skypilot.py` runs the
real one and asks SkyPilot's own client.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from broker.transport.allow_list import read_allowed
from broker.transport.keys import load_pair, load_public
from configs.errors import NyalaError
from configs.loader import load
from configs.settings import Settings
from console.verbs.fleet import render
from learner.checkpointing.manifest import KEY, run_key

Document = dict[str, Any]
RUN = '#!/bin/sh\necho $# >called; for word; do echo "$word"; done >>called\n'
RESTARTED = {4, 75, 130, 137, 143}
"""Exit codes of an actor that is to be started again (docs/fleet.md)."""


@dataclass
class Group:
    """The parsed documents of one file."""

    header: Document
    tasks: dict[str, Document]
    settings: Settings
    folder: Path

    @property
    def actors(self) -> list[Document]:
        return [task for name, task in self.tasks.items() if name.startswith("actor")]


def rendered(folder: Path, settings: Settings) -> Group:
    """Render into a folder, and read what came of it."""
    (file,) = render(settings, "skypilot", folder)
    header, *tasks = [each for each in yaml.safe_load_all(file.read_text()) if each]
    by_name = {task["name"]: task for task in tasks}
    assert len(by_name) == len(tasks)
    return Group(header, by_name, settings, folder)


@dataclass
class Machine:
    """What the commands of one task leave behind."""

    home: Path
    words: list[str]
    """Of `./run`."""

    @property
    def given(self) -> dict[str, str]:
        """The settings that they change."""
        pairs = zip(self.words, self.words[1:], strict=False)
        changes = [word for flag, word in pairs if flag == "--set"]
        return dict(change.split("=", 1) for change in changes)

    @property
    def config(self) -> Path:
        named = [word.removeprefix("--config=") for word in self.words if "--config=" in word]
        return Path(named[0]) if named else Path("none")

    def settings(self) -> Settings:
        return load(self.config, [f"{key}={value}" for key, value in self.given.items()])


def started(task: Document, group: Group, home: Path) -> Machine:
    """Copy what SkyPilot copies, and run the commands as it does; a second time on its machine.

    Raises:
        AssertionError: A command fails, or a file to copy is not there.
    """
    checkout = home / "sky_workdir"
    checkout.mkdir(parents=True, exist_ok=True)
    (checkout / "run").write_text(RUN)
    (checkout / "run").chmod(0o755)
    for to, source in task["file_mounts"].items():
        place = Path(to.replace("~", str(home)))
        place.parent.mkdir(parents=True, exist_ok=True)
        assert Path(source).is_file(), f"{source} is not there"
        shutil.copyfile(source, place)
        place.chmod(0o644)
    environment = {
        "HOME": str(home),
        "PATH": os.environ["PATH"],
        "SKYPILOT_JOBGROUP_NAME": str(group.header["name"]),
    }
    for command in (task["setup"], task["run"]):
        (checkout / "called").unlink(missing_ok=True)
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=checkout,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=20,
        )
        assert done.returncode == 0, done.stderr
        assert (checkout / "called").exists(), f"{command} does not use the checkout"
    return Machine(home, (checkout / "called").read_text().splitlines()[1:])


def problems(group: Group, place: Path) -> list[str]:
    """List what would keep the group from starting, meeting, recovering or ending."""
    found = [*_of_the_group(group)]
    for task in group.tasks.values():
        found += [f"{task['name']}: {text}" for text in _of_the_task(task, group)]
    try:
        hub = started(group.tasks["hub"], group, place / "hub")
        actors = [started(task, group, place / task["name"]) for task in group.actors]
    except AssertionError as error:
        return [*found, f"the commands fail: {error}"]
    found += [f"hub: {text}" for text in _of_the_hub(hub, group)]
    for actor in actors:
        found += [f"{actor.home.name}: {text}" for text in _of_the_actor(actor, hub, group)]
    return found


def _of_the_group(group: Group) -> Iterator[str]:
    header = group.header
    if header.get("execution") != "parallel":
        yield "the tasks would run one after the other"
    if header.get("primary_tasks") != ["hub"]:
        yield "the group must end when the hub has, and only then"
    delay_s = int(str(header.get("termination_delay", "0s")).removesuffix("s"))
    if delay_s < group.settings.actors.drain_s + 20:
        yield "actors have no time to end by themselves"
    if not set(header["name"]) <= set(
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_"
    ):
        yield "SkyPilot refuses the name"
    fleet = group.settings.fleet
    if len(group.actors) != max(fleet.min_actors, group.settings.actors.count):
        yield "the number of actors is not the fleet's"


def _of_the_task(task: Document, group: Group) -> Iterator[str]:
    resources, is_hub = task["resources"], task["name"] == "hub"
    if task.get("num_nodes", 1) != 1:
        yield "all nodes are replaced where one is taken away"
    if resources.get("use_spot", False) is is_hub:
        yield "spot is for actors, and for them alone"
    cards = resources.get("accelerators", {})
    counts = {int(cards.rpartition(":")[2])} if isinstance(cards, str) else set(cards.values())
    settings = group.settings
    wanted = settings.learner.ranks if is_hub else settings.actors.tensor_parallel_size
    if counts != {wanted}:
        yield f"it needs {wanted} cards"
    if not (Path(task.get("workdir", "none")) / "run").exists():
        yield "there is no checkout"
    yield from _of_the_recovery(resources.get("job_recovery", {}), is_hub=is_hub)
    yield from _of_the_files(task["file_mounts"], is_hub=is_hub)


def _of_the_recovery(recovery: Document, *, is_hub: bool) -> Iterator[str]:
    if recovery.get("strategy") != "FAILOVER":
        yield "another region, where the others cannot be reached"
    if not 0 < recovery.get("max_restarts_on_errors", 0) <= 10:
        yield "an error is never tried again, or for ever"
    if set(recovery) - {"strategy", "max_restarts_on_errors", "recover_on_exit_codes"}:
        yield "SkyPilot says nothing of a field of job_recovery that it does not know"
    if not is_hub and set(recovery.get("recover_on_exit_codes", [])) != RESTARTED:
        yield "exit codes are not those of docs/fleet.md"


def _of_the_files(mounts: dict[str, str], *, is_hub: bool) -> Iterator[str]:
    if any(Path(source).is_dir() for source in mounts.values()):
        yield "SkyPilot leaves out what git ignores in a folder"
    secrets = {Path(source).name for source in mounts.values() if source.endswith(".key")}
    own = {"broker.key", "learner.key", KEY} if is_hub else {"enrolment.key"}
    if secrets - own:
        yield f"it has no business with {', '.join(sorted(secrets - own))}"


def _of_the_hub(machine: Machine, group: Group) -> Iterator[str]:
    if machine.words[:1] != ["up"] or "--plain" not in machine.words:
        yield "it must be `nyala up` for a log"
    try:
        settings = machine.settings()
        keys = settings.broker.keys or Path("none")
        for name in ("broker", "learner"):
            load_pair(keys, name)
        run_key(settings.run.folder)
    except NyalaError as error:
        yield str(error)
        return
    if settings.actors.count:
        yield "it starts actors of its own"
    if machine.home not in keys.parents or machine.home not in settings.run.directory.parents:
        yield "it writes where nothing is kept"
    if (settings.run.folder / KEY).read_text() != (group.folder / "keys" / KEY).read_text():
        yield "the next machine would refuse its checkpoints"
    enrolment = load_public(group.folder / "keys", "enrolment")
    if enrolment not in read_allowed(keys):
        yield "no actor may register"


def _of_the_actor(machine: Machine, hub: Machine, group: Group) -> Iterator[str]:
    if machine.words[:1] != ["actor"]:
        yield "it must be `nyala actor`"
    try:
        settings = machine.settings()
        keys = settings.broker.keys or Path("none")
        load_pair(keys, "enrolment")
        load_public(keys, "broker")
        listens = hub.settings()
    except NyalaError as error:
        yield str(error)
        return
    name = f"hub-0.{group.header['name']}"
    if settings.broker.endpoint != listens.broker.endpoint.replace("0.0.0.0", name):
        yield f"nobody listens at {settings.broker.endpoint}"
    if listens.broker.advertise != settings.broker.endpoint.removeprefix("tcp://"):
        yield f"its broker is told to be at {listens.broker.advertise}"
    published = listens.learner.publisher_endpoint.replace("tcp://0.0.0.0", name)
    if listens.learner.advertise != published:
        yield f"nobody publishes at {listens.learner.advertise}"
    if settings.actors.exit_when_told not in RESTARTED:
        yield "one that was told to go is not started again"
    if machine.home not in settings.run.directory.parents:
        yield "it writes where it may not"
