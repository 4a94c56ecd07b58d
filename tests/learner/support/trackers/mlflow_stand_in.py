"""An MLflow server played over HTTP, in memory; the real one is in `test-long trackers`."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit


@dataclass
class MlflowStandIn:
    """What such a server has got; one experiment, and any number of runs."""

    url: str = ""
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    metrics: Counter[tuple[str, int]] = field(default_factory=Counter)
    """(name, step) -> times."""
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    models: list[str] = field(default_factory=list)
    versions: list[dict[str, Any]] = field(default_factory=list)
    headers: list[str | None] = field(default_factory=list)
    """`Authorization` of each request."""
    answers: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    """Given to the next calls of `log-batch` in place of doing them."""
    hangs: threading.Event = field(default_factory=threading.Event)
    """While set, no call is answered."""
    ending: threading.Event = field(default_factory=threading.Event)
    has_more: threading.Condition = field(default_factory=threading.Condition)

    def steps(self, name: str) -> list[int]:
        """Steps of a metric, each as often as it was sent."""
        return sorted(
            s for (n, s), times in self.metrics.items() if n == name for _ in range(times)
        )

    def call(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Answer a call of the API."""
        match path:
            case "experiments/get" | "experiments/get-by-name":
                return 200, {"experiment": {"experiment_id": "0"}}
            case "runs/create":
                run_id = f"run-{len(self.runs)}"
                uri = f"mlflow-artifacts:/0/{run_id}/artifacts"
                self.runs[run_id] = {"run_id": run_id, "artifact_uri": uri, "status": "RUNNING"}
                return 200, {"run": {"info": self.runs[run_id]}}
            case "runs/update":
                self.runs[body["run_id"]]["status"] = body["status"]
            case "runs/get":
                tags = [{"key": key, "value": value} for key, value in self.tags.items()]
                return 200, {"run": {"info": self.runs[body["run_id"]], "data": {"tags": tags}}}
            case "runs/log-batch":
                if self.answers:
                    return self.answers.pop(0)
                assert len(body.get("metrics", [])) <= 1000
                assert len(body.get("params", [])) <= 100
                self.params |= {each["key"]: each["value"] for each in body.get("params", [])}
                self.metrics.update((m["key"], m["step"]) for m in body.get("metrics", []))
            case "runs/set-tag":
                self.tags[body["key"]] = body["value"]
            case _:
                return self._registry_call(path, body)
        return 200, {}

    def _registry_call(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        match path:
            case "registered-models/create" if body["name"] in self.models:
                return 400, {"error_code": "RESOURCE_ALREADY_EXISTS"}
            case "registered-models/create":
                self.models.append(body["name"])
            case "model-versions/create":
                self.versions.append(body)
            case _:
                return 404, {"error_code": "ENDPOINT_NOT_FOUND"}
        return 200, {}


@contextmanager
def mlflow_stand_in() -> Iterator[MlflowStandIn]:
    """Serve one on a free port of this machine."""
    state = MlflowStandIn()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            query = {k: v[0] for k, v in parse_qs(urlsplit(self.path).query).items()}
            self._answer(query)

        def do_POST(self) -> None:
            self._answer(json.loads(self._body()))

        def do_PUT(self) -> None:
            state.files[self.path.partition("/artifacts/")[2]] = self._body()
            self._send(200, {})

        def log_message(self, *_: object) -> None:
            pass

        def _body(self) -> bytes:
            return self.rfile.read(int(self.headers["Content-Length"]))

        def _answer(self, body: dict[str, Any]) -> None:
            while state.hangs.is_set() and not state.ending.wait(0.05):
                pass
            path = urlsplit(self.path).path.removeprefix("/api/2.0/mlflow/")
            with state.has_more:
                state.headers.append(self.headers.get("Authorization"))
                answer = state.call(path, body)
                state.has_more.notify_all()
            self._send(*answer)

        def _send(self, status: int, body: dict[str, Any]) -> None:
            text = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        state.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield state
        finally:
            state.ending.set()
            server.shutdown()
