"""The recipes for Slurm on a real one: a run to its end, a preempted actor, as many as are wanted.

Beside CI: `pytest -q tests/system/slurm.py`, with Debian's slurmctld, slurmd and slurm-client
installed, or unpacked (`apt-get download`, `dpkg -x`) into the folder that NYALA_SLURM names. One
node, two partitions; nothing of it listens beyond loopback, and all of it ends with the test.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from configs.loader import load
from configs.settings import Settings
from console.run.redis_server import free_port
from console.run.run_folder import RunFolder
from console.verbs.fleet import SlurmFleet, render
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
STEPS = 400  # ten seconds of a quick machine: what actors cost is counted by looks every two
SLURM = Path(os.environ.get("NYALA_SLURM", "/"))
LIBRARIES = SLURM / "usr" / "lib" / "x86_64-linux-gnu"
PLUGINS = LIBRARIES / "slurm-wlm"
PATIENCE_S = 120.0
HELD_S = 5
"""How long a requeued job is held back; two minutes where nobody says otherwise."""

SETTINGS = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/none
AuthInfo=cred_expire={held_s}
CredType=cred/none
PluginDir={plugins}
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MpiDefault=none
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=spot Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime=40
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""


@dataclass
class Cluster:
    """A controller and a node, with their own settings."""

    folder: Path
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self) -> None:
        for name in ("state", "spool"):
            (self.folder / name).mkdir()
        text = SETTINGS.format(
            folder=self.folder,
            host=socket.gethostname().partition(".")[0],
            user=getpass.getuser(),
            plugins=PLUGINS,
            held_s=HELD_S,
            ports=[free_port() for _ in range(2)],
        )
        (self.folder / "slurm.conf").write_text(text)
        step = self._program("slurmstepd")
        for daemon in (
            [self._program("slurmctld"), "-D"],
            [self._program("slurmd"), "-D", "-d", step],
        ):
            with (self.folder / "daemons.log").open("ab") as log:
                self.daemons.append(
                    subprocess.Popen(daemon, env=self.environment, stdout=log, stderr=log)
                )
        wait_until(lambda: "idle" in self.ask("sinfo"), timeout_s=PATIENCE_S)

    @property
    def environment(self) -> dict[str, str]:
        """Variables of its commands; jobs inherit them."""
        places = [self.folder / "bin", SLURM / "usr/bin", SLURM / "usr/sbin"]
        own = {
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PATH": os.pathsep.join([*map(str, places), os.environ["PATH"]]),
            "PYTHONPATH": str(ROOT),
        }
        if "NYALA_SLURM" in os.environ:
            own["LD_LIBRARY_PATH"] = f"{LIBRARIES}:{PLUGINS}"
        return os.environ | own

    def ask(self, *command: str) -> str:
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        return done.stdout + done.stderr

    def state(self, job: str) -> str:
        return self.ask("squeue", "-h", "-a", "-j", job, "-o", "%T").strip()

    def stop(self) -> None:
        self.ask("scancel", f"--user={getpass.getuser()}")
        with suppress(AssertionError):
            wait_until(lambda: not self.ask("squeue", "-h", "-a"), timeout_s=30)
        for daemon in reversed(self.daemons):
            daemon.terminate()
            daemon.wait(30)

    def _program(self, name: str) -> str:
        places = os.pathsep.join(str(SLURM / "usr" / place) for place in ("sbin", "bin"))
        for each in (name, f"{name}-wlm"):
            if (found := shutil.which(each, path=places)) is not None:
                return found
        raise AssertionError(f"{name} must be below {SLURM}; name its place with NYALA_SLURM")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def write_job(folder: Path) -> str:
    """Write what the recipe's job needs: settings, keys, `nyala`; the node has no cards."""
    run = {"name": "far", "model": "init", "environment": "calculator"}
    render(Settings.model_validate({"run": run}), "slurm", folder)
    (folder / "hub").write_text("127.0.0.1\n")
    write_nyala(folder)
    recipe = folder / "actor.sh"
    lines = [line for line in recipe.read_text().splitlines() if "--gres" not in line]
    text = "\n".join(lines).replace("$hub:5757", f"$hub:{free_port()}")
    recipe.write_text(text + "\n")
    return "actor.sh"


def write_nyala(folder: Path) -> None:
    """Put `nyala` where jobs find it."""
    (folder / "bin").mkdir()
    nyala = folder / "bin" / "nyala"
    code = "from console.main import app; app()"
    nyala.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{code}" "$@"\n')
    nyala.chmod(0o755)


@pytest.mark.timeout(400)
def test_a_preempted_actor_is_requeued_and_a_cancelled_one_is_not(
    cluster: Cluster, tmp_path: Path
) -> None:
    def looked(times: int) -> Callable[[], bool]:
        return lambda: sum("looking for the broker" in line for line in lines()) >= times

    def lines() -> list[str]:
        logs = tmp_path.glob("nyala-actor-*")
        return [line for log in logs for line in log.read_text().splitlines()]

    said = cluster.ask(*("sbatch", "--partition=spot", "--array=0", write_job(tmp_path)))
    job = said.split()[-1]
    wait_until(looked(1), timeout_s=PATIENCE_S)

    cluster.ask("sbatch", "--partition=high", "-n2", "--wrap=sleep 3")
    wait_until(lambda: cluster.state(job) == "PENDING", timeout_s=PATIENCE_S)

    wait_until(looked(2), timeout_s=PATIENCE_S)
    assert cluster.state(job) == "RUNNING"
    assert any("Exited with exit code 75" in line for line in lines())
    cluster.ask("scancel", job)
    wait_until(lambda: cluster.state(job) not in {"RUNNING", "COMPLETING"}, timeout_s=PATIENCE_S)
    assert cluster.state(job) != "PENDING"


@pytest.mark.timeout(400)
def test_as_many_jobs_run_as_are_wanted(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    script = write_job(tmp_path)
    folder = RunFolder(tmp_path / "far")
    folder.path.mkdir()
    folder.config.write_text((tmp_path / "config.yaml").read_text())
    fleet = SlurmFleet(folder, Path(script), ["--partition=spot"])

    def jobs() -> list[str]:
        asked = ("squeue", "-h", "--states=R,PD,CF", "-o", "%i %j %T", "--sort=i")
        return cluster.ask(*asked).splitlines()

    def want(actors: int) -> None:
        with folder.metrics.open("a") as file:
            file.write(json.dumps({"step": actors, "actors_wanted": actors}) + "\n")

    want(3)
    fleet.adjust_jobs()
    wait_until(lambda: sum("RUNNING" in job for job in jobs()) == 2, timeout_s=PATIENCE_S)
    first, second, third = jobs()
    assert "nyala-actor-far" in first
    assert third.endswith("PENDING"), "the node has room for two"
    want(2)
    fleet.adjust_jobs()
    wait_until(lambda: len(jobs()) == 2, timeout_s=PATIENCE_S)
    assert jobs() == [first, second], "one that waits goes before one that works"
    want(1)
    fleet.adjust_jobs()
    wait_until(lambda: jobs() == [first], timeout_s=PATIENCE_S)


@pytest.mark.timeout(600)
def test_a_hub_and_an_actor_train_to_the_end_though_their_node_is_taken_away(
    cluster: Cluster, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    changes = [f"run.directory={tmp_path}", f"run.steps={STEPS}", "fleet.price_per_actor_hour=3600"]
    render(load(ROOT / "configs" / "tiny.yaml", changes), "slurm", out)
    ports = {"5757": str(free_port()), "5758": str(free_port())}
    write_nyala(tmp_path)
    for name in ("hub.sh", "actor.sh"):
        lines = [line for line in (out / name).read_text().splitlines() if "--gres" not in line]
        text = re.sub("575[78]", lambda match: ports[match[0]], "\n".join(lines))
        (out / name).write_text(text + "\n")

    metrics = tmp_path / "tiny" / "metrics.jsonl"

    jobs = [cluster.ask("sbatch", "--partition=spot", str(out / "hub.sh")).split()[-1]]
    wait_until((out / "hub").exists, timeout_s=PATIENCE_S)
    jobs.append(cluster.ask("sbatch", "--partition=spot", str(out / "actor.sh")).split()[-1])
    wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") > 4, timeout_s=240)
    cluster.ask("sbatch", "--partition=high", "-n2", "--wrap=sleep 3")
    wait_until(lambda: cluster.state(jobs[0]) == "PENDING", timeout_s=PATIENCE_S)
    before = metrics.read_text().count("\n")
    wait_until(lambda: not cluster.ask("squeue", "-h"), timeout_s=400)

    logs = "\n".join(path.read_text()[-3000:] for path in out.glob("*.log"))
    for job in jobs:
        assert "JobState=COMPLETED" in cluster.ask("scontrol", "show", "job", job), logs
    summary = json.loads((tmp_path / "tiny" / "summary.json").read_text())
    assert summary["steps"] == STEPS
    assert before < STEPS
    assert summary["learner_lives"] == 2
    assert 0 < summary["cost"] < 400
    last = json.loads(metrics.read_text().splitlines()[-1])
    assert last["actors"] == 1
    assert "actors busy" in last["actors_wanted_why"], last
