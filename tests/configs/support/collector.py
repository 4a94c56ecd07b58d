"""A collector of OpenTelemetry: a real HTTP server that reads the requests of exporters.

It stands for a collector, Jaeger or Tempo: all of them take the same protobuf at the same path.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Status


@dataclass(frozen=True, slots=True)
class Received:
    """A span as a collector has it."""

    process: dict[str, Any]
    """Of the process that made it, by OpenTelemetry's names."""
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    """Empty for a root."""
    began_ns: int
    ended_ns: int
    attributes: dict[str, Any]
    links: tuple[tuple[str, str], ...]
    is_error: bool


class Collector:
    """Listens on a port of the loopback from its beginning to the end of its `with`."""

    def __init__(self) -> None:
        self.received: list[Received] = []
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.status = 200
        """Of the answers."""
        self.hangs = threading.Event()
        """Set: requests are read and not answered."""
        self.hung = threading.Event()
        """Set once a request is read and not answered."""
        self._ended = threading.Event()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if collector.hangs.is_set():
                    collector.hung.set()
                    collector._ended.wait(60)
                    return
                collector._take(self.path, dict(self.headers), body)
                self.send_response(collector.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Write nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def _take(self, path: str, headers: dict[str, str], body: bytes) -> None:
        self.paths.append(path)
        self.headers.append(headers)
        if self.status == 200:
            self.received += _read(body)


def _read(body: bytes) -> list[Received]:
    request = ExportTraceServiceRequest.FromString(body)
    found = []
    for of_process in request.resource_spans:
        process = _attributes(of_process.resource.attributes)
        for scope in of_process.scope_spans:
            found += [
                Received(
                    process=process,
                    name=span.name,
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    began_ns=span.start_time_unix_nano,
                    ended_ns=span.end_time_unix_nano,
                    attributes=_attributes(span.attributes),
                    links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
                    is_error=span.status.code == Status.STATUS_CODE_ERROR,
                )
                for span in scope.spans
            ]
    return found


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair) for pair in pairs}


def _value(pair: KeyValue) -> Any:
    value: AnyValue = pair.value
    kind = value.WhichOneof("value")
    return getattr(value, kind) if kind else None
