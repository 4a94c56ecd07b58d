"""MLflow: a run on a server, over its REST API alone, without its package.

Figures go to `log-batch`, settings become parameters, tables artifacts that MLflow shows as tables.
The finished model is uploaded through the server and registered.
"""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from configs.settings import RunSettings
from configs.tables.trackers import MlflowSettings

from .http_api import HttpApi, RefusedCall, naming_server
from .tracker import Parameters, SampleTable, TrackedFigures

API = "api/2.0/mlflow"
ARTIFACTS = "api/2.0/mlflow-artifacts/artifacts"
MAX_PARAMETERS = 100  # of one request, as MLflow's limits say
MAX_METRICS = 1000  # likewise
SHOWN_TABLES = 50  # the tag that names tables has at most 8,000 characters
TABLES_TAG = "mlflow.loggedArtifacts"


class MlflowRun:
    """A run on a server of MLflow.

    Args:
        settings: Settings of the server.
        run: Settings of the run.
        environ: Variables with `MLFLOW_TRACKING_TOKEN`, or `MLFLOW_TRACKING_USERNAME` and
            `_PASSWORD`, where the server asks for them.
    """

    def __init__(
        self, settings: MlflowSettings, run: RunSettings, environ: Mapping[str, str] = os.environ
    ) -> None:
        self._settings, self._name = settings, run.name
        self._api = HttpApi(settings.url, credentials(environ))
        self._run_id: str | None = None
        self._artifacts = ""
        self._tables: list[str] = []

    def check_requirements(self) -> None:
        with naming_server("mlflow", self._settings.url):
            answer = self._api.get(f"{API}/experiments/get?experiment_id=0")
            if "experiment" not in answer:
                raise OSError("its answer is not one of MLflow")

    def start_run(self, run_id: str | None, parameters: Parameters) -> str:
        """Continue a run, or make one with its parameters."""
        self._run_id = self._run_id or run_id  # made by a try that failed behind it
        if self._run_id is None:
            answer = self._post(
                "runs/create",
                experiment_id=self._experiment(),
                run_name=self._name,
                start_time=_milliseconds(time.time()),
            )
            self._run_id = str(answer["run"]["info"]["run_id"])
        else:
            self._post("runs/update", run_id=self._run_id, status="RUNNING")
        if run_id is None:
            params = [{"key": name, "value": _text(value)} for name, value in parameters.items()]
            self._log_batches("params", params, most=MAX_PARAMETERS)
        self._read_run()
        return self._run_id

    def log(self, points: Sequence[TrackedFigures]) -> None:
        # The same point twice, after an answer that was lost, is one in MLflow's database.
        metrics = [
            {
                "key": name,
                "value": value,
                "timestamp": _milliseconds(point.time),
                "step": point.step,
            }
            for point in points
            for name, value in point.figures.items()
        ]
        self._log_batches("metrics", metrics, most=MAX_METRICS)

    def table(self, table: SampleTable) -> None:
        path = f"{table.name}-{table.step:06d}.json"
        text = json.dumps({"columns": list(table.columns), "data": [*map(list, table.rows)]})
        self._api.put_bytes(self._artifact(path), text.encode())
        self._tables = [*(name for name in self._tables if name != path), path][-SHOWN_TABLES:]
        shown = json.dumps([{"path": name, "type": "table"} for name in self._tables])
        self._post("runs/set-tag", run_id=self._run_id, key=TABLES_TAG, value=shown)

    def take_model(self, folder: Path, on_progress: Callable[[], None]) -> None:
        """Upload the model's files, and make them a version of the registered model."""
        name = self._settings.register_as
        if name is None:
            return
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            path = self._artifact(f"model/{file.relative_to(folder).as_posix()}")
            self._api.put_file(path, file, on_progress)
        try:
            self._post("registered-models/create", name=name)
        except RefusedCall as error:
            if error.code != "RESOURCE_ALREADY_EXISTS":
                raise
        source = f"{self._artifacts}/model"
        self._post("model-versions/create", name=name, source=source, run_id=self._run_id)

    def end_run(self, *, is_finished: bool) -> None:
        self._post(
            "runs/update",
            run_id=self._run_id,
            status="FINISHED" if is_finished else "KILLED",
            end_time=_milliseconds(time.time()),
        )

    def _experiment(self) -> str:
        name = self._settings.experiment
        try:
            query = urlencode({"experiment_name": name})
            answer = self._api.get(f"{API}/experiments/get-by-name?{query}")
            return str(answer["experiment"]["experiment_id"])
        except RefusedCall as error:
            if error.code != "RESOURCE_DOES_NOT_EXIST":
                raise
        return str(self._post("experiments/create", name=name)["experiment_id"])

    def _read_run(self) -> None:
        """Read where artifacts go, and which tables there are."""
        run = self._api.get(f"{API}/runs/get?{urlencode({'run_id': str(self._run_id)})}")["run"]
        self._artifacts = str(run["info"]["artifact_uri"])
        for tag in run["data"].get("tags", []):
            if tag["key"] == TABLES_TAG:
                self._tables = [str(table["path"]) for table in json.loads(tag["value"])]

    def _artifact(self, path: str) -> str:
        """Path under which the server takes a file of the run."""
        parts = urlsplit(self._artifacts)
        if parts.scheme != "mlflow-artifacts":
            raise RefusedCall(
                0,
                "",
                f"MLflow's server must store tables and models itself, got a run whose "
                f"artifacts are at {self._artifacts}; start it with --serve-artifacts",
            )
        whole = f"{parts.path.strip('/')}/{path}"
        return f"{ARTIFACTS}/{quote(whole)}"

    def _log_batches(self, kind: str, items: Sequence[object], *, most: int) -> None:
        for at in range(0, len(items), most):
            some = {kind: items[at : at + most]}
            self._post("runs/log-batch", run_id=self._run_id, **some)

    def _post(self, call: str, **body: object) -> dict[str, Any]:
        return self._api.post(f"{API}/{call}", body)


def credentials(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the header for the credentials in MLflow's own variables."""
    if token := environ.get("MLFLOW_TRACKING_TOKEN"):
        return {"Authorization": f"Bearer {token}"}
    if name := environ.get("MLFLOW_TRACKING_USERNAME"):
        pair = f"{name}:{environ.get('MLFLOW_TRACKING_PASSWORD', '')}"
        return {"Authorization": f"Basic {base64.b64encode(pair.encode()).decode()}"}
    return {}


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


def _text(value: object) -> str:
    """Write a parameter: as JSON, but for texts, which stay as they are."""
    return value if isinstance(value, str) else json.dumps(value)
