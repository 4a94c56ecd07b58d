"""`nyala up` from start to end: real console, Redis and subprocesses; roles are stand-ins."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from configs.json_lines import read_rows
from lab.faults.stores import SIZE_MB, fill, small_disk
from learner.stopping import write_left_batch
from tests.needs import needs
from tests.waiting import is_alive, wait_until

pytestmark = pytest.mark.live

ROOT = Path(__file__).parents[2]
SETTINGS = """
run: {{name: r, directory: "{directory}", model: init, environment: calculator, steps: {steps}}}
broker: {{endpoint: "tcp://127.0.0.1:0"}}
actors: {{count: 2, engine: torch}}
console: {{refresh_s: 0.05, stop_timeout_s: 5}}
"""


class Up:
    """Starts `nyala up` on one run; ends what a failed test left."""

    def __init__(self, folder):
        self.directory = folder / "runs"
        self.run = self.directory / "r"
        self.config = folder / "settings.yaml"
        self.children = []

    def start(self, *flags, steps=20, behaviours=None):
        self.config.write_text(SETTINGS.format(directory=self.directory, steps=steps))
        child = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.console.support.up_with_stand_ins"),
                *(json.dumps(behaviours or {}), str(self.config), *flags),
            ],
            cwd=ROOT,
            env={k: v for k, v in os.environ.items() if k != "NYALA_REDIS_URL"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.children.append(child)
        return child

    def to_the_end(self, *flags, **choices):
        child = self.start(*flags, **choices)
        out, err = child.communicate(timeout=60)
        return child.returncode, out, err

    def steps_done(self):
        return len(read_rows(self.run / "metrics.jsonl"))

    def redis(self):
        return redis.Redis.from_url((self.run / "redis.url").read_text().strip())

    def processes(self):
        """Return the process ids of everything that works on this run."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                cwd = (entry / "cwd").readlink()
            except OSError:
                continue
            is_redis = "-server" in command and cwd == self.run / "redis"
            if is_redis or ("stand_in " in command and str(self.run) in command):
                found.append(int(entry.name))
        return found


@pytest.fixture
def up(tmp_path):
    up = Up(tmp_path)
    yield up
    for child in up.children:
        if child.poll() is None:
            child.kill()
        child.communicate()
    wait_until(lambda: not any(is_alive(pid) for pid in up.processes()))


def test_a_run_goes_to_its_end_and_leaves_its_files(up):
    code, out, err = up.to_the_end()

    assert (code, err) == (0, "")
    assert "learner: importing as learner" in out
    assert "r: batch 20/20, reward" in out
    assert "held-out accuracy after" in out
    assert (up.run / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert "torch" in json.loads((up.run / "versions.json").read_text())
    assert {path.name for path in (up.run / "logs").iterdir()} == {
        "redis.log",
        "broker.log",
        "learner.log",
        "actor-0.log",
        "actor-1.log",
    }
    assert [row["role"] for row in read_rows(up.run / "ends.jsonl")] == ["actor", "actor", "broker"]
    assert up.processes() == []
    wider = [path for path in up.run.rglob("*") if path.lstat().st_mode & 0o027]
    assert wider == []


@needs("root")
def test_a_disk_that_fills_up_is_called_full_before_anything_dies_of_it(up):
    says = f"the disk must have room, got 0.00 MiB free of {SIZE_MB}; free some space on the disk"
    with small_disk(up.directory):
        child = up.start(steps=2000)
        wait_until(lambda: up.steps_done() >= 3)

        with fill(up.directory):
            said = next(line for line in child.stdout if says in line or "starts again" in line)

        child.send_signal(signal.SIGINT)
        child.communicate(timeout=60)
    assert "starts again" not in said


def test_a_report_that_cannot_be_written_is_a_warning(up):
    (up.run / "report.html" / "in the way").mkdir(parents=True)

    code, out, _ = up.to_the_end(steps=3)

    assert code == 0
    assert f"warning: {up.run}/report.html could not be written: " in out
    assert "held-out accuracy after" in out


def test_a_finished_run_is_reported_and_only_fresh_runs_it_again(up):
    up.to_the_end(steps=3)

    code, out, _ = up.to_the_end(steps=3)

    assert code == 0
    assert "r has finished; --fresh begins it anew" in out
    assert up.steps_done() == 3

    code, _, error = up.to_the_end(steps=4)

    assert code == 2
    assert f"run.name=NEW --set run.model={up.run}/model" in error
    assert "$.run.steps was 3, got 4" in error

    code, out, _ = up.to_the_end("--fresh", steps=4)

    assert code == 0
    assert "the earlier run is now in" in out
    (archived,) = [path for path in up.directory.iterdir() if path.name.startswith("r.")]
    assert len(read_rows(archived / "metrics.jsonl")) == 3
    assert up.steps_done() == 4


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_run_stops_cleanly_and_goes_on_where_it_was(up, number):
    child = up.start(steps=200)
    wait_until((up.run / "checkpoints" / "step-000010").exists)
    with up.redis() as client:
        client.set("k", "v")
    write_left_batch(up.run, 1)  # as a learner does that is stopped within a batch

    child.send_signal(number)
    out, err = child.communicate(timeout=30)

    assert child.returncode == 130, err
    assert f"nyala up {up.config}" in out
    assert "to go on from step-0000" in out
    (kept,) = [line for line in out.splitlines() if line.startswith("kept: ")]
    assert kept.endswith("; batch 1, which was under way, is trained again")
    assert up.processes() == []
    roles = [str(row["role"]) for row in read_rows(up.run / "ends.jsonl")]
    assert sorted(roles[:3]) == ["actor", "actor", "learner"]
    assert roles[3:] == ["broker"]

    steps = up.steps_done()
    again = up.start(steps=200)
    wait_until(lambda: up.steps_done() > steps)
    with up.redis() as client:
        assert client.get("k") == b"v"
    again.send_signal(signal.SIGINT)
    out, _ = again.communicate(timeout=30)
    assert "r goes on from step-0000" in out
    assert "learner: importing as learner" in out


def test_changed_settings_of_an_unfinished_run_are_refused(up):
    child = up.start(steps=200)
    wait_until(lambda: up.steps_done() > 0)
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=30)

    code, _, err = up.to_the_end("--set", "learner.lr=0.5", "--set", "actors.count=1", steps=200)

    assert code == 2
    assert "$.learner.lr was 1e-06, got 0.5" in err
    assert "actors.count" not in err


def test_a_crashed_process_is_started_again_and_says_what_it_complained_of(up):
    code, out, _ = up.to_the_end(steps=60, behaviours={"actor-1": "crashes once"})

    assert code == 0
    assert "actor-1 ended with code 1; it starts again in" in out
    assert "out of luck" in out


def test_a_run_goes_on_without_the_watch_of_its_actors_and_reports_its_end(up):
    code, out, _ = up.to_the_end(steps=80, behaviours={"actor-watch": "dies"})

    assert code == 0
    assert out.count("actors are no longer watched: RuntimeError('out of luck')") == 1


def test_a_killed_actor_is_replaced(up):
    child = up.start(steps=100)
    wait_until(lambda: up.steps_done() > 0)
    actors = [
        pid
        for pid in up.processes()
        if b"stand_in\0actor" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]

    os.kill(actors[0], signal.SIGKILL)
    out, _ = child.communicate(timeout=60)

    assert child.returncode == 0
    assert "was killed by signal 9 (out of memory?); it starts again in" in out


def test_a_settings_error_of_a_process_stops_the_run_with_its_words(up):
    code, out, _ = up.to_the_end(behaviours={"broker": "refuses"})

    assert code == 2
    assert "broker: run.reward must be good, got bad" in out
    assert "stopped: broker needs something changed first" in out
    assert up.processes() == []


def test_nothing_survives_a_killed_up(up):
    child = up.start(steps=2000)
    wait_until(lambda: up.steps_done() > 0)
    pids = up.processes()
    assert len(pids) == 5

    child.kill()
    child.wait()

    wait_until(lambda: not any(is_alive(pid) for pid in pids))


def test_a_second_up_of_a_running_run_is_refused(up):
    child = up.start(steps=2000)
    wait_until(lambda: up.steps_done() > 0)

    code, _, err = up.to_the_end(steps=2000)

    assert code == 2
    assert f"got a second `nyala up` beside process {child.pid}" in err


def test_dry_run_starts_and_writes_nothing(up):
    code, out, _ = up.to_the_end("--dry-run")

    assert code == 0
    assert "would start in" in out
    told = out.split("settings that differ from their defaults")[1].splitlines()
    assert "  actors.count: 2 (default 1)" in told
    assert "max_policy_lag" not in out
    assert not up.run.exists()
