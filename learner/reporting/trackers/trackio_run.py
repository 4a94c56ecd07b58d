"""trackio: a run on its server, over its HTTP API alone, without its package."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from configs.errors import SettingsError
from configs.settings import RunSettings
from configs.tables.trackers import TrackioSettings

from .http_api import HttpApi, naming_server
from .tracker import Parameters, SampleTable, TrackedFigures

API_VERSION = 1


class TrackioRun:
    """A run on a server of trackio.

    Args:
        settings: Settings of the server.
        run: Settings of the run.
    """

    def __init__(self, settings: TrackioSettings, run: RunSettings) -> None:
        token = os.environ.get("TRACKIO_WRITE_TOKEN")
        self._api = HttpApi(settings.url, {"X-Trackio-Write-Token": token} if token else {})
        self._settings, self._name = settings, run.name
        self._run_id = ""
        self._config: Parameters | None = None

    def check_requirements(self) -> None:
        with naming_server("trackio", self._settings.url):
            version = self._api.get("version").get("api_version")
            if version != API_VERSION:
                raise SettingsError(
                    f"trackers.trackio.url must be a server with version {API_VERSION} of "
                    f"trackio's API, got {self._settings.url} with version {version}; install such "
                    "a trackio there, correct the address, or leave it out with "
                    "trackers.trackio=null"
                )
            status = self._api.post("api/get_run_mutation_status", {"args": [], "kwargs": {}})
        if not status.get("data", {}).get("allowed"):
            raise SettingsError(
                f"TRACKIO_WRITE_TOKEN must be the write token of {self._settings.url}, got none or "
                f"one that it refuses; set it to the token that `trackio show` prints where the "
                f"server starts"
            )

    def start_run(self, run_id: str | None, parameters: Parameters) -> str:
        """Choose an id; the run begins with its first entry."""
        self._run_id = run_id or secrets.token_hex(8)
        self._config = parameters if run_id is None else None
        return self._run_id

    def log(self, points: Sequence[TrackedFigures]) -> None:
        self._send([(point.step, dict(point.figures)) for point in points])

    def table(self, table: SampleTable) -> None:
        rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
        self._send([(table.step, {table.name: {"_type": "trackio.table", "_value": rows}})])

    def take_model(self, folder: Path, on_progress: Callable[[], None]) -> None:
        """Do nothing: the server takes no models over HTTP."""

    def end_run(self, *, is_finished: bool) -> None:
        """Do nothing: a run has no end there."""

    def _send(self, entries: Sequence[tuple[int, Mapping[str, object]]]) -> None:
        logs = [
            {
                "project": self._settings.project,
                "run": self._name,
                "run_id": self._run_id,
                "metrics": metrics,
                "step": step,
                "config": self._config,
                # It keeps one entry of an id: a second try after a lost answer is harmless.
                "log_id": f"{self._run_id}-{step}-{_digest(metrics)}",
            }
            for step, metrics in entries
        ]
        self._api.post("api/bulk_log", {"args": [], "kwargs": {"logs": logs, "hf_token": None}})
        self._config = None


def _digest(names: Iterable[str]) -> str:
    return hashlib.blake2b("\n".join(sorted(names)).encode(), digest_size=8).hexdigest()
