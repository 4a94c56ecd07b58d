"""A run on an MLflow server, against a stand-in that speaks its REST API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from configs.settings import RunSettings
from configs.tables.trackers import MlflowSettings
from learner.reporting.trackers import http_api
from learner.reporting.trackers.delivery import Delivery
from learner.reporting.trackers.http_api import RefusedCall
from learner.reporting.trackers.mlflow_run import TABLES_TAG, MlflowRun, credentials
from learner.reporting.trackers.tracker import TrackedFigures
from tests.learner.support.trackers.mlflow_stand_in import MlflowStandIn, mlflow_stand_in
from tests.learner.support.trackers.written_run import WrittenRun

RUN = RunSettings(model="init", name="spelling")


@pytest.fixture
def server() -> Iterator[MlflowStandIn]:
    with mlflow_stand_in() as state:
        yield state


def tracker_of(server: MlflowStandIn, *, register_as: str | None = None) -> MlflowRun:
    return MlflowRun(MlflowSettings(url=server.url, register_as=register_as), RUN, {})


def deliver(server: MlflowStandIn, run: WrittenRun, *, register_as: str | None = None) -> Delivery:
    tracker = tracker_of(server, register_as=register_as)
    parameters = {f"run.x{n}": n for n in range(150)}
    delivery = Delivery("mlflow", tracker, run.folder, parameters, first_pause_s=0.001)
    delivery.start()
    delivery.request_end(is_finished=True)
    delivery.join(60)
    assert delivery.has_got_all
    return delivery


def test_a_server_has_metrics_parameters_tables_and_the_registered_model(
    server: MlflowStandIn, tmp_path: Path
) -> None:
    run = WrittenRun(tmp_path)
    for step in range(1, 20):
        run.train(step)
    run.evaluate(0, 0.5)
    run.keep(10, episodes=2)
    weights = tmp_path / "model" / "model.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(bytes(range(256)) * 5000)

    assert deliver(server, run, register_as="speller").refused == 0

    assert server.steps("reward/mean") == list(range(1, 20))
    assert server.steps("eval/accuracy") == [0]
    assert len(server.params) == 150
    assert [(each["run_id"], each["status"]) for each in server.runs.values()] == [
        ("run-0", "FINISHED")
    ]
    table = json.loads(server.files["0/run-0/artifacts/samples/train-000010.json"])
    assert len(table["data"]) == 2
    assert len(table["columns"]) == len(table["data"][0])
    assert json.loads(server.tags[TABLES_TAG]) == [
        {"path": "samples/train-000010.json", "type": "table"}
    ]
    assert server.files["0/run-0/artifacts/model/model.safetensors"] == weights.read_bytes()
    source = "mlflow-artifacts:/0/run-0/artifacts/model"
    assert server.versions == [{"name": "speller", "source": source, "run_id": "run-0"}]


def test_a_later_life_goes_on_in_the_same_run_and_names_all_its_tables(
    server: MlflowStandIn, tmp_path: Path
) -> None:
    run = WrittenRun(tmp_path)
    run.train(1)
    run.keep(1)
    deliver(server, run)
    run.train(2)
    run.keep(2)
    deliver(server, run)

    assert list(server.runs) == ["run-0"]
    assert server.steps("reward/mean") == [1, 2]
    assert [each["path"] for each in json.loads(server.tags[TABLES_TAG])] == [
        "samples/train-000001.json",
        "samples/train-000002.json",
    ]


def test_a_busy_server_is_tried_again_and_what_it_refuses_is_left_out(
    server: MlflowStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("learner.reporting.trackers.delivery.LAST_PAUSE_S", 0.001)
    run = WrittenRun(tmp_path)
    run.train(1)
    server.answers += [(503, {}), (429, {})]
    assert deliver(server, run).refused == 0
    assert list(server.runs) == ["run-0"]
    run.train(2)
    run.evaluate(2, 0.5)
    server.answers += [(500, {}), (401, {}), (400, {"message": "no such name"})]

    assert deliver(server, run).refused == 1

    assert server.steps("reward/mean") == [1]
    assert server.steps("eval/accuracy") == [2]


def test_points_with_more_metrics_than_a_request_may_have_are_sent_in_several(
    server: MlflowStandIn,
) -> None:
    tracker = tracker_of(server)
    tracker.start_run(None, {})
    figures = {f"part/{number}": 0.5 for number in range(130)}

    tracker.log([TrackedFigures(step, 1e9, figures) for step in range(1, 17)])

    assert sum(server.metrics.values()) == 16 * 130
    assert server.steps("part/129") == list(range(1, 17))


def test_a_model_that_is_registered_again_is_a_further_version(
    server: MlflowStandIn, tmp_path: Path
) -> None:
    tracker = tracker_of(server, register_as="speller")
    tracker.start_run(None, {})

    for _ in range(2):
        tracker.take_model(tmp_path, lambda: None)

    assert (server.models, len(server.versions)) == (["speller"], 2)


def test_a_server_that_takes_no_files_refuses_tables_and_says_what_to_change(
    server: MlflowStandIn, tmp_path: Path
) -> None:
    run, tracker = WrittenRun(tmp_path), tracker_of(server, register_as="speller")
    run_id = tracker.start_run(None, {})
    server.runs[run_id]["artifact_uri"] = "s3://bucket/0/run-0/artifacts"
    tracker.start_run(run_id, {})
    tracker.log([TrackedFigures(1, 1e9, {"reward/mean": 0.5})])
    (run.folder / "file").touch()

    with pytest.raises(RefusedCall, match=r"s3://bucket.*start it with --serve-artifacts"):
        tracker.take_model(run.folder, lambda: None)
    assert server.steps("reward/mean") == [1]


def test_a_server_that_does_not_answer_in_time_is_away(
    server: MlflowStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_api, "TIMEOUT_S", 0.2)
    server.hangs.set()

    with pytest.raises(OSError, match="timed out"):
        tracker_of(server).start_run(None, {})


def test_keys_come_from_mlflows_own_variables_and_go_into_every_request(
    server: MlflowStandIn,
) -> None:
    environ = {"MLFLOW_TRACKING_TOKEN": "t0"}
    MlflowRun(MlflowSettings(url=server.url), RUN, environ).start_run(None, {"run.seed": 1})

    assert set(server.headers) == {"Bearer t0"}
    pair = {"MLFLOW_TRACKING_USERNAME": "ana", "MLFLOW_TRACKING_PASSWORD": "p"}
    assert credentials(pair) == {"Authorization": "Basic YW5hOnA="}
    assert credentials({}) == {}
