"""The example for Ray of docs/fleet.md, on a Ray of this machine: actors follow the number.

Beside CI: `pytest -q tests/system/fleet/ray_example.py`. Ray comes into an environment and a
network of its own, as it listens on all addresses. The run's environment waits until both actors
are there, so that they need not load within a certain time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.newcomer.pages import blocks_of
from tests.system.support.own_network import OwnNetwork
from tests.waiting import wait_until

ROOT = Path(__file__).parents[3]
PATIENCE_S = 300.0
RAY = "ray==2.60.*"
TWO_CARDS = ("--head", "--num-gpus=2", "--num-cpus=2", "--node-ip-address=127.0.0.1")
STEPS = 400
RUN = ["fleet.min_actors=2", "fleet.max_actors=2", "actors.count=0", f"run.steps={STEPS}"]
WORDS = {"dataset": "spell_backward", "prompt_style": "compact", "dense": True}
WORDS |= {"min_word_len": 3, "max_word_len": 3}
PORTS = ["broker.endpoint=tcp://127.0.0.1:5757", "learner.publisher_endpoint=tcp://127.0.0.1:5758"]


@pytest.fixture
def network(tmp_path: Path) -> Iterator[OwnNetwork]:
    (tmp_path / "network").mkdir()
    network = OwnNetwork(tmp_path / "network")
    try:
        yield network
    finally:
        network.close()


def write_example(folder: Path) -> Path:
    """Write the block as it stands, but for the pause between looks."""
    (text,) = [block.text for block in blocks_of("docs/fleet.md") if block.language == "python"]
    assert "time.sleep(30)" in text
    path = folder / "on_ray.py"
    path.write_text(text.replace("time.sleep(30)", "time.sleep(1)"))
    return path


def write_nyala(folder: Path) -> str:
    """Put `nyala` where Ray's workers find it; returns their PATH."""
    code = "from console.main import app; app()"
    (folder / "bin").mkdir()
    nyala = folder / "bin" / "nyala"
    nyala.write_text(
        f'#!/bin/sh\nexport PYTHONPATH="{ROOT}"\nexec "{sys.executable}" -c "{code}" "$@"\n'
    )
    nyala.chmod(0o755)
    return f"{folder / 'bin'}:{os.environ['PATH']}"


def install_ray(folder: Path) -> Path:
    """Make an environment with Ray; returns the folder of its programs."""
    own = ROOT / ".venv" / "bin" / "uv"
    uv = str(own) if own.exists() else "uv"
    for command in (["venv", folder], ["pip", "install", "--python", folder / "bin/python", RAY]):
        subprocess.run([uv, *map(str, command)], check=True, timeout=PATIENCE_S)
    return folder / "bin"


@pytest.mark.timeout(900)
def test_as_many_actors_run_on_ray_as_are_wanted(network: OwnNetwork, tmp_path: Path) -> None:
    run, log = tmp_path / "tiny", tmp_path / "log"
    places: dict[str, Any] = {
        "cwd": tmp_path,
        "env": {
            **os.environ,
            "HOME": str(tmp_path),
            "PATH": write_nyala(tmp_path),
            "PYTHONPATH": "",
            "CUDA_VISIBLE_DEVICES": "0,1",  # which the cluster claims to have
        },
        "stderr": subprocess.STDOUT,
    }
    with_ray = install_ray(tmp_path / "ray")
    wait_file = tmp_path / "seconds"
    wait_file.write_text("2")
    words = {**WORDS, "wait_file": str(wait_file)}
    settings = [
        f"--set={each}"
        for each in (
            *(*RUN, *PORTS, f"run.directory={tmp_path}"),
            f"run.environment={ROOT}/tests/system/support/waiting_words.py:WaitingWords",
            f"run.environment_settings={json.dumps(words)}",
        )
    ]
    with ExitStack() as ended, log.open("wb") as output:

        def start(*command: object) -> subprocess.Popen[bytes]:
            words = [*network.as_machine, *map(str, command)]
            process = subprocess.Popen(words, stdout=output, **places)
            ended.callback(process.wait, 60)
            ended.callback(process.kill)
            return process

        hub = start("nyala", "up", ROOT / "configs" / "tiny.yaml", "--plain", *settings)
        wait_until((run / "config.yaml").exists, timeout_s=PATIENCE_S)
        wait_until((run / "init" / "config.json").exists, timeout_s=PATIENCE_S)
        pack = ["nyala", "join-pack", str(run), "--host=127.0.0.1", "--name=far"]
        subprocess.run([*network.inside, *pack], check=True, timeout=PATIENCE_S, **places)

        begin = f"{with_ray}/ray start {' '.join(TWO_CARDS)}"
        script = f"{with_ray}/python {write_example(tmp_path)} tiny far.nyala"
        driver = start("sh", "-c", f"{begin} && exec {script}")

        def has_ended() -> bool:
            return hub.poll() is not None or driver.poll() not in {None, 0}

        wait_until(lambda: has_ended() or both_are_there(run), timeout_s=PATIENCE_S)
        wait_file.write_text("0")
        wait_until(has_ended, timeout_s=PATIENCE_S)
        assert hub.poll() == 0, log.read_text()[-5000:]
        assert driver.wait(120) == 0, log.read_text()[-5000:]
    assert [row["step"] for row in rows_of(run)] == list(range(1, STEPS + 1))
    assert both_are_there(run), rows_of(run)[-1]
    assert len({name for row in rows_of(run)[-50:] for name in row["episodes_by_actor"]}) > 1


def rows_of(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
    return [json.loads(row) for row in whole.splitlines()]


def both_are_there(run: Path) -> bool:
    """Whether the newest batch had as many actors as were wanted."""
    rows = rows_of(run)
    return bool(rows) and rows[-1]["actors"] == rows[-1]["actors_wanted"] == 2
