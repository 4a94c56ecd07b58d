"""A live run in real trackers: TensorBoard, W&B offline, a server of MLflow, and one of trackio.

Run beside CI, `pytest tests/system/trackers.py`: it installs their packages into Pythons of their
own. The learner is killed in the middle, MLflow's server is away for a while.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from console.run.redis_server import free_port
from learner.reporting.trackers.delivery import read_bookmark
from tests.system.support.live_run import LiveRun
from tests.system.support.real_trackers import EVENTS, WANDB, ask, make_venv, read_by, server

STEPS = 300  # of a tenth of a second: enough for a server to stop and start
pytestmark = [pytest.mark.live, pytest.mark.timeout(1800)]


class Servers:
    """MLflow's and trackio's."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mlflow_python = make_venv(folder / "mlflow", "mlflow")
        self._trackio_python = make_venv(folder / "trackio", "trackio")
        self.mlflow = f"http://127.0.0.1:{free_port()}"
        self._trackio_port = free_port()
        self.trackio = f"http://127.0.0.1:{self._trackio_port}"

    def mlflow_server(self) -> Any:
        """Serve the same database and files each time."""
        return server(
            [
                str(self._mlflow_python.with_name("mlflow")),
                "server",
                *("--host", "127.0.0.1", "--port", self.mlflow.rpartition(":")[2]),
                *("--backend-store-uri", f"sqlite:///{self._folder}/mlflow.db"),
                *("--artifacts-destination", str(self._folder / "artifacts"), "--workers", "1"),
            ],
            f"{self.mlflow}/health",
            self._folder,
            {},
        )

    def trackio_server(self) -> Any:
        return server(
            [str(self._trackio_python.with_name("trackio")), "show"],
            f"{self.trackio}/version",
            self._folder,
            {
                "TRACKIO_DIR": str(self._folder / "trackio-data"),
                "GRADIO_SERVER_PORT": str(self._trackio_port),
                "TRACKIO_WRITE_TOKEN": "token",
                "BROWSER": "true",
            },
        )


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveRun, Servers, Path]]:
    """A finished run of which all trackers have got the end, the servers, and its Python."""
    folder = tmp_path_factory.mktemp("tracked")
    python = make_venv(folder / "python", "tensorboard", "wandb", with_ours=True)
    (folder / "servers").mkdir()
    servers = Servers(folder / "servers")
    run = LiveRun(
        folder,
        "tiny.yaml",
        f"run.steps={STEPS}",
        "run.samples.every=25",
        "run.eval_every=50",
        "trackers.tensorboard=true",
        "trackers.wandb={}",
        f"trackers.mlflow={{url: '{servers.mlflow}', register_as: speller}}",
        f"trackers.trackio={{url: '{servers.trackio}'}}",
    )
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr(sys, "executable", str(python))
        patch.setenv("TRACKIO_WRITE_TOKEN", "token")
        stack.enter_context(servers.trackio_server())
        mlflow = ExitStack()
        mlflow.enter_context(servers.mlflow_server())
        with run.up() as process:
            run.wait_until(lambda: _has(run, "wandb"), "W&B has begun, and has batches")
            (learner,) = run.pids("learner")
            os.kill(learner, signal.SIGKILL)
            run.wait_until(
                lambda: len(run.pids("learner")) == 1 and run.pids("learner") != [learner],
                "the learner is back",
            )
            mlflow.close()
            step = run.step
            run.wait_until(lambda: run.step >= step + 10, "training goes on without MLflow")
            stack.enter_context(servers.mlflow_server())
            run.finish(process, within_s=600)
        yield run, servers, python


def _has(run: LiveRun, tracker: str) -> bool:
    return read_bookmark(run.folder, tracker).sent.get("batches", 0) > 0


def rewards_of(run: LiveRun) -> dict[int, float]:
    return {line["step"]: line["reward_mean"] for line in run.lines("metrics")}


def test_tensorboard_reads_every_batch_once_and_the_texts(
    tracked: tuple[LiveRun, Servers, Path],
) -> None:
    run, _, python = tracked
    found = read_by(python, EVENTS, run.folder / "tensorboard")

    assert {s: pytest.approx(v) for s, v in found["scalars"]["reward/mean"]} == rewards_of(run)
    assert len(found["scalars"]["reward/mean"]) == STEPS
    assert [step for step, _ in found["scalars"]["eval/accuracy"]][-1] == STEPS
    assert {"settings/text_summary", "samples/train/text_summary"} <= set(found["texts"])
    assert found["others"] == ["_hparams_/session_start_info"]


def test_wandbs_offline_folders_are_one_run_with_every_batch_once(
    tracked: tuple[LiveRun, Servers, Path],
) -> None:
    run, _, python = tracked
    found = read_by(python, WANDB, run.folder / "wandb")

    assert len({each["id"] for each in found["runs"]}) == 1
    assert len(found["runs"]) >= 2
    assert found["runs"][0]["config"]["run.steps"] == STEPS
    rewards = [(e["step"], e["reward/mean"]) for e in found["history"] if "reward/mean" in e]
    assert dict(rewards) == pytest.approx(rewards_of(run))
    assert len(rewards) == STEPS
    assert any("samples/train" in name for each in found["history"] for name in each)


def test_mlflow_has_metrics_parameters_tables_and_the_registered_model(
    tracked: tuple[LiveRun, Servers, Path],
) -> None:
    run, servers, _ = tracked
    api = f"{servers.mlflow}/api/2.0/mlflow"
    experiment = ask(f"{api}/experiments/get-by-name?experiment_name=nyala")["experiment"]
    body = {"experiment_ids": [experiment["experiment_id"]]}
    (found,) = ask(f"{api}/runs/search", body)["runs"]
    run_id = found["info"]["run_id"]

    assert (found["info"]["run_name"], found["info"]["status"]) == ("tiny", "FINISHED")
    params = {each["key"]: each["value"] for each in found["data"]["params"]}
    assert params["run.steps"] == str(STEPS)
    query = f"run_id={run_id}&metric_key=reward/mean&max_results=1000"
    history = ask(f"{api}/metrics/get-history?{query}")["metrics"]
    assert {each["step"]: each["value"] for each in history} == pytest.approx(rewards_of(run))
    assert len(history) == STEPS
    tags = {each["key"]: each["value"] for each in found["data"]["tags"]}
    assert "samples/train-000025.json" in tags["mlflow.loggedArtifacts"]
    artifacts = ask(f"{api}/artifacts/list?run_id={run_id}&path=samples")["files"]
    assert {"samples/train-000025.json", "samples/eval-000000.json"} <= {
        each["path"] for each in artifacts
    }
    (version,) = ask(f"{api}/model-versions/search")["model_versions"]
    assert (version["name"], version["run_id"], version["status"]) == ("speller", run_id, "READY")
    (weights,) = servers._folder.glob(f"artifacts/*/{run_id}/artifacts/model/model.safetensors")
    assert weights.read_bytes() == (run.folder / "model" / "model.safetensors").read_bytes()


def test_trackio_has_every_batch_once_and_tables(tracked: tuple[LiveRun, Servers, Path]) -> None:
    run, servers, _ = tracked
    keywords = {"project": "nyala", "run": "tiny"}
    found = ask(f"{servers.trackio}/api/get_logs", {"args": [], "kwargs": keywords})["data"]

    rewards = [(each["step"], each["reward/mean"]) for each in found if "reward/mean" in each]
    assert dict(rewards) == pytest.approx(rewards_of(run))
    assert len(rewards) == STEPS
    assert any(each.get("samples/train", {}).get("_type") == "trackio.table" for each in found)


def test_the_learners_log_says_once_that_a_tracker_was_away_and_came_back(
    tracked: tuple[LiveRun, Servers, Path],
) -> None:
    run, _, _ = tracked
    log = (run.folder / "logs" / "learner.log").read_text()
    lines = [line for line in log.splitlines() if '"tracker": "mlflow"' in line]

    assert sum("a tracker is unreachable" in line for line in lines) == 1
    assert sum("a tracker is reachable again" in line for line in lines) == 1
    assert [line for line in run.lines("metrics") if "trackers_ended" in line["alerts"]] == []
