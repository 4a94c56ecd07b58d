"""The job group for SkyPilot: loaded by its own client, and its commands run as processes.

Beside CI: `pytest -q tests/system/fleet/skypilot.py`. The client comes into an environment of its
own (`uv run --with skypilot`). Each machine is a home folder with the files that SkyPilot would
copy; all of them are in one network of their own, in which the group's names lead to it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from configs.loader import load
from console.verbs.fleet import render
from tests.system.support.own_network import OwnNetwork
from tests.waiting import wait_until

ROOT = Path(__file__).parents[3]
PATIENCE_S = 240.0
VERSION = "skypilot==0.14.*"
LOAD = """
import json, sys
from sky.utils import dag_utils
found = {}
for path in sys.argv[1:]:
    try:
        group = dag_utils.load_dag_from_yaml(path)
        found[path] = [group.name, group.is_job_group(), group.primary_tasks, [
            [task.name, sorted(task.file_mounts), task.workdir,
             sorted((r.use_spot, sorted(r.accelerators.items())) for r in task.resources)]
            for task in group.tasks]]
    except ValueError as error:
        found[path] = str(error)
print(json.dumps(found))
"""


def rendered(out: Path, *changes: str) -> list[dict[str, Any]]:
    """Render a small run whose model is a folder, and read the group."""
    settings = load(ROOT / "configs" / "tiny.yaml", changes)
    (file,) = render(settings, "skypilot", out)
    return [each for each in yaml.safe_load_all(file.read_text()) if each]


def put(folder: Path, name: str, documents: list[dict[str, Any]]) -> str:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump_all(documents))
    return str(path)


@pytest.mark.timeout(400)
def test_its_own_client_loads_the_group_and_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    changes = ["run.model=Qwen/Qwen3-0.6B", "fleet.min_actors=2", "learner.ranks=4"]
    rendered(tmp_path / "out", *changes)

    def mutant(name: str, *place: str, value: object = 1) -> str:
        documents = rendered(tmp_path / "out", *changes)
        table: Any = documents[int(place[0])]
        for key in place[1:-1]:
            table = table[key]
        table[place[-1]] = value
        return put(tmp_path, name, documents)

    whole = str(tmp_path / "out" / "group.yaml")
    refused = {
        mutant("a field of a task", "1", "rum"): "rum",
        mutant("a field of resources", "2", "resources", "use_spots"): "use_spots",
        mutant("a primary task", "0", "primary_tasks", value=["learner"]): "learner",
        mutant("a delay", "0", "termination_delay", value="soon"): "soon",
        mutant("a name", "0", "name", value="nyala.tiny"): "nyala.tiny",
        mutant("two of a name", "2", "name", value="hub"): "hub",
        mutant("a header that is none", "0", "execution", value="together"): "execution",
    }
    uv = ROOT / ".venv" / "bin" / "uv"
    done = subprocess.run(
        [
            *(str(uv) if uv.exists() else "uv", "run", "--no-project", "--isolated"),
            *("--with", VERSION, "python", "-c", LOAD, whole, *refused),
        ],
        cwd=tmp_path,
        env=os.environ | {"HOME": str(tmp_path), "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )

    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    name, is_group, primary, tasks = found[whole]
    assert (name, is_group, primary) == ("nyala-tiny", True, ["hub"])
    keys = [f"~/nyala/keys/{key}" for key in ("broker.pub", "enrolment.key")]
    assert [task[0] for task in tasks] == ["hub", "actor-0", "actor-1"]
    assert tasks[0][3] == [[False, [["H100", 4]]]]
    assert tasks[1][3] == [[True, [["A100-80GB", 1]]], [True, [["H100", 1]]]]
    assert tasks[1][1] == ["~/nyala/config.yaml", *keys]
    assert tasks[1][2] == str(ROOT)
    for path, word in refused.items():
        assert isinstance(found[path], str), f"{path} was taken"
        assert word in found[path]


@dataclass
class Machines:
    """Machines of a group: processes in namespaces of this test."""

    folder: Path
    group: str
    network: OwnNetwork
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(
        self, task: dict[str, Any], home: Path, *, dies_whole: bool = False
    ) -> subprocess.Popen[bytes]:
        """Copy the files of a task to a new machine, and run its commands there.

        Args:
            task: Of the group.
            home: A new folder.
            dies_whole: `kill` ends whatever it has started too, as the end of a machine does.
        """
        for to, source in task["file_mounts"].items():
            place = Path(to.replace("~", str(home)))
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, place)  # modes are lost
        inside = self.network.as_machine if dies_whole else self.network.inside
        environment = os.environ | {"HOME": str(home), "SKYPILOT_JOBGROUP_NAME": self.group}
        setup = ["bash", "-c", task["setup"]]  # it may download, so that it is left outside
        run = [*inside, "bash", "-c", task["run"]]
        with (home / "log").open("wb") as log:
            places: dict[str, Any] = {"cwd": ROOT, "env": environment, "stdout": log, "stderr": log}
            subprocess.run(setup, check=True, timeout=PATIENCE_S, **places)
            process = subprocess.Popen(run, start_new_session=True, **places)
        self.started.append(process)
        return process

    def log(self) -> str:
        return "\n".join(path.read_text()[-3000:] for path in self.folder.glob("*/log"))

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.wait(30)
        self.network.close()


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A model in a folder, as all machines have it."""
    command = [
        "init-model",
        str(ROOT / "configs" / "tiny.yaml"),
        "--set",
        f"run.directory={tmp_path}",
    ]
    code = "from console.main import app; app()"
    subprocess.run([sys.executable, "-c", code, *command], cwd=ROOT, check=True, timeout=PATIENCE_S)
    return tmp_path / "tiny" / "init"


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    (tmp_path / "machines").mkdir()
    network = OwnNetwork(tmp_path / "machines", "hub-0.nyala-tiny")
    machines = Machines(tmp_path / "machines", "nyala-tiny", network)
    try:
        yield machines
    finally:
        machines.close()


def batches(home: Path) -> int:
    """Batches that the hub of this machine has trained, or had when it began."""
    file = home / "nyala" / "runs" / "tiny" / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return int(json.loads(lines[-1])["step"]) if lines else 0


@pytest.mark.timeout(900)
def test_its_commands_train_a_run_to_its_end_though_machines_are_lost(
    made: Path, machines: Machines, tmp_path: Path
) -> None:
    header, hub_task, actor_task = rendered(
        tmp_path / "out",
        *(f"run.model={made}", "run.steps=60", "learner.checkpoint_every=2"),
        f"learner.checkpoint_url=file://{tmp_path}/bucket",
    )
    assert header["name"] == machines.group
    first, second = (machines.folder / name for name in ("hub-1", "hub-2"))

    hub = machines.start(hub_task, first, dies_whole=True)
    actor = machines.start(actor_task, machines.folder / "actor-1")
    wait_until(lambda: batches(first) >= 5, timeout_s=PATIENCE_S)

    actor.send_signal(signal.SIGTERM)
    code = actor.wait(60)
    assert code in actor_task["resources"]["job_recovery"]["recover_on_exit_codes"], machines.log()
    actor = machines.start(actor_task, machines.folder / "actor-2")
    trained = batches(first)
    wait_until(lambda: batches(first) >= trained + 5, timeout_s=PATIENCE_S)

    hub.kill()
    hub.wait(30)
    trained = batches(first)
    shutil.rmtree(first)
    hub = machines.start(hub_task, second, dies_whole=True)
    assert actor.wait(PATIENCE_S) in {1, 2}, "the empty machine cannot know its key"
    actor = machines.start(actor_task, machines.folder / "actor-3")
    wait_until(lambda: batches(second) > 0, timeout_s=PATIENCE_S)
    assert (
        json.loads(
            (second / "nyala" / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()[0]
        )["step"]
        >= trained - 4
    ), "it began anew"

    assert hub.wait(PATIENCE_S) == 0, machines.log()
    assert actor.wait(60) == 0, machines.log()
    assert batches(second) == 60
    assert (
        json.loads((second / "nyala" / "runs" / "tiny" / "summary.json").read_text())["steps"] == 60
    )
