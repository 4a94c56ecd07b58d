"""The HTTP server of one process: `/metrics`, `/livez`, `/readyz`, in threads of its own.

Reads a role's figures when it is asked, never in between. Answers at most `MAX_CALLERS` at a time,
each within `CALLER_S`; one more cuts off whoever has been served longest, so that a probe is
answered beside any number of callers that read slowly or say nothing. While it serves,
`<run>/metrics/<name>-<port>.json` has its address, in the form of Prometheus' `file_sd_configs`.
"""

from __future__ import annotations

import errno
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import accumulate
from pathlib import Path
from socket import AF_INET, AF_INET6, SHUT_RDWR, socket
from typing import Self

import structlog
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from . import durable
from .errors import SettingsError
from .metrics import TARGETS, Health, Histogram, Metric, Value, Values, host_and_port
from .worker import Worker

MAX_CALLERS = 8  # one Prometheus and two probes, each of them twice, and room to look by hand
CALLER_S = 5.0
LEAVES_S = 0.5  # for a thread whose connection was cut; reading figures takes milliseconds
Family = GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily

log = structlog.get_logger()


class MetricsServer:
    """Serves the page of one process from `start` to `close`.

    Args:
        setting: Name of the setting with the address, for errors.
        endpoint: The address, `http://HOST:PORT`; port 0 = a free one.
        metrics: All metrics that the page may have.
        read: Returns the values of the metrics; called from the server's threads.
        health: Health of the process.
        folder: Folder of the run.
        labels: Labels of the target: `run`, `role` and `name`.
        or_any_port: Whether to take a free port where the one of the address is taken.

    Raises:
        SettingsError: The address cannot be listened on.
    """

    def __init__(
        self,
        setting: str,
        endpoint: str,
        metrics: Sequence[Metric],
        read: Callable[[], Values],
        health: Health,
        *,
        folder: Path,
        labels: dict[str, str],
        or_any_port: bool,
    ) -> None:
        self._health = health
        self._registry = CollectorRegistry()  # vLLM's own is the global one
        self._registry.register(_FiguresCollector(metrics, read, health))
        ProcessCollector(registry=self._registry)
        self._labels = labels
        self._server = _listen(setting, endpoint, self._answer, or_any_port=or_any_port)
        self._target = folder / TARGETS / f"{labels['name']}-{self._server.server_port}.json"
        self._worker = Worker(self._server.serve_forever, name="metrics")

    @property
    def url(self) -> str:
        """Address of the page."""
        host, port = self._server.server_address[:2]
        assert isinstance(host, str)
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/metrics"

    def start(self) -> Self:
        """Begin to serve, and write the address where Prometheus and `nyala status` find it.

        Addresses of this machine in that folder at which nobody listens are removed.
        """
        self._worker.start()
        host_port = self.url.removeprefix("http://").removesuffix("/metrics")
        text = json.dumps([{"targets": [host_port], "labels": self._labels}]) + "\n"
        try:
            _remove_dead(self._target.parent, host_and_port(self.url)[0])
            durable.replace_file(self._target, text)
        except OSError as error:  # a container may have the run's folder to read
            log.info("address of the metrics not written down", reason=str(error))
        log.info("metrics", url=self.url)
        return self

    def close(self) -> None:
        """Stop serving, remove the address, and log how long answers took."""
        self._server.shutdown()
        self._server.server_close()
        self._worker.join(CALLER_S)
        log.info("pages", read=self._server.answered, cpu_s=round(self._server.cpu_s, 3))
        try:
            self._target.unlink(missing_ok=True)
        except OSError as error:
            log.info("address of the metrics not removed", reason=str(error))

    def _answer(self, path: str) -> tuple[HTTPStatus, str, bytes]:
        """Make the answer to a GET: status, content type, content."""
        match path.partition("?")[0]:
            case "/metrics":
                return HTTPStatus.OK, CONTENT_TYPE_PLAIN_0_0_4, generate_latest(self._registry)
            case "/livez":
                return _probe_answer(self._health.not_alive())
            case "/readyz":
                return _probe_answer(self._health.not_ready())
            case _:
                return HTTPStatus.NOT_FOUND, "text/plain", b"/metrics, /livez, /readyz\n"


class _FiguresCollector(Collector):
    """The figures of a role as Prometheus' families."""

    def __init__(
        self, metrics: Sequence[Metric], read: Callable[[], Values], health: Health
    ) -> None:
        self._metrics, self._read, self._health = metrics, read, health

    def describe(self) -> Iterator[Family]:
        """Describe no metrics in advance: a role may not be ready when it is registered."""
        return iter(())

    def collect(self) -> Iterator[Family]:
        values = {**self._read(), READY.name: float(self._health.not_ready() is None)}
        for metric in (READY, *self._metrics):
            value = values.get(metric.name)
            if value is not None:
                yield _family(metric, value)


READY = Metric("nyala_ready", "gauge", "0 or 1", "1 = waits for nothing but work, as `/readyz`.")


def _family(metric: Metric, value: Value) -> Family:
    name, text = metric.name, metric.meaning
    if isinstance(value, Histogram):
        counts = list(accumulate(value.counts))
        bounds = [*map(str, value.bounds), "+Inf"]
        buckets = list(zip(bounds, counts, strict=True))
        return HistogramMetricFamily(name, text, buckets=buckets, sum_value=value.total)
    labels = [metric.label] if metric.label else []
    family = (CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily)(
        name, text, labels=labels
    )
    if isinstance(value, int | float):
        family.add_metric([], value)
    else:
        for label, number in list(value.items()):
            family.add_metric([label], number)
    return family


def _probe_answer(fault: str | None) -> tuple[HTTPStatus, str, bytes]:
    if fault is None:
        return HTTPStatus.OK, "text/plain", b"ok\n"
    return HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", f"{fault}\n".encode()


class _Server(ThreadingHTTPServer):
    """Threads for a few callers; one more takes the place of the oldest."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = AF_INET6 if ":" in address[0] else AF_INET
        self._room = threading.BoundedSemaphore(MAX_CALLERS)
        self._lock = threading.Lock()
        self._served: dict[socket, None] = {}
        """Callers with a thread, oldest first, but for those that were cut off."""
        self.answered, self.cpu_s = 0, 0.0
        """Callers so far, and the CPU time that their threads took."""
        super().__init__(address, handler)

    def get_request(self) -> tuple[socket, object]:
        """Accept a caller; without a free file descriptor, pause: the loop would never rest."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(LEAVES_S)
            raise

    def process_request(
        self, request: socket | tuple[bytes, socket], client_address: object
    ) -> None:
        assert isinstance(request, socket)
        if not self._room.acquire(blocking=False):
            self._cut_off_oldest()
            if not self._room.acquire(timeout=LEAVES_S):
                self.shutdown_request(request)
                return
        with self._lock:
            self._served[request] = None
        super().process_request(request, client_address)

    def _cut_off_oldest(self) -> None:
        """End the oldest connection; its thread then frees its place by itself."""
        with self._lock:
            oldest = next(iter(self._served), None)
            if oldest is not None:
                del self._served[oldest]
                with suppress(OSError):  # its peer was faster
                    oldest.shutdown(SHUT_RDWR)

    def process_request_thread(
        self, request: socket | tuple[bytes, socket], client_address: object
    ) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self.answered += 1
                self.cpu_s += time.thread_time()
            self._room.release()

    def shutdown_request(self, request: socket | tuple[bytes, socket]) -> None:
        """End a connection, which then cannot be cut off any more."""
        assert isinstance(request, socket)
        with self._lock:
            self._served.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        if request not in self._served:  # cut off, maybe thousands of them
            return
        log.info(
            "a request for metrics got no answer",
            caller=str(client_address),
            reason=str(sys.exception()),
        )


def _remove_dead(folder: Path, host: str) -> None:
    """Remove addresses of this machine at which nobody listens: killed processes left them."""
    for file in folder.glob("*.json"):
        (target,) = json.loads(file.read_text(encoding="utf-8"))
        address, port = host_and_port(f"http://{target['targets'][0]}")
        if address != host:
            continue
        with socket(AF_INET6 if ":" in host else AF_INET) as probe:
            probe.settimeout(CALLER_S)
            if probe.connect_ex((host, port)) == errno.ECONNREFUSED:
                file.unlink(missing_ok=True)


def _listen(
    setting: str,
    endpoint: str,
    answer: Callable[[str], tuple[HTTPStatus, str, bytes]],
    *,
    or_any_port: bool,
) -> _Server:
    class Handler(BaseHTTPRequestHandler):
        timeout = CALLER_S

        def do_GET(self) -> None:
            status, kind, content = answer(self.path)
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - theirs
            """Log nothing: Prometheus asks every few seconds."""

    host, port = host_and_port(endpoint)
    try:
        return _Server((host, port), Handler)
    except OSError as error:
        if or_any_port and error.errno == errno.EADDRINUSE:
            return _Server((host, 0), Handler)
        raise SettingsError(
            f"{setting} must be an address of this machine with a free port, got {endpoint}: "
            f"{error.strerror or error}; choose another, or port 0 for any free one"
        ) from None
