"""Preemption notices, asked of a local server that answers as the clouds' metadata services do."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from actors.preemption import (
    AwsNotices,
    AzureNotices,
    GcpNotices,
    Notices,
    source_of,
    stop_at_notice,
    until_noticed,
)

ACTION = "/latest/meta-data/spot/instance-action"
PREEMPTED = "/computeMetadata/v1/instance/preempted"
EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"


class Metadata(ThreadingHTTPServer):
    """A metadata service: pages by path, and which header each cloud insists on."""

    pages: dict[str, str]

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Answer(BaseHTTPRequestHandler):
    server: Metadata

    def do_PUT(self) -> None:
        has_ttl = "X-aws-ec2-metadata-token-ttl-seconds" in self.headers
        self._reply(200 if self.path == "/latest/api/token" and has_ttl else 400, "secret")

    def do_GET(self) -> None:
        allowed = {
            ACTION: self.headers.get("X-aws-ec2-metadata-token") == "secret",
            PREEMPTED: self.headers.get("Metadata-Flavor") == "Google",
            EVENTS: self.headers.get("Metadata") == "true",
        }
        if not allowed.get(self.path, False):
            self._reply(401, "")
        elif self.path in self.server.pages:
            self._reply(200, self.server.pages[self.path])
        else:
            self._reply(404, "")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name
        """Say nothing."""

    def _reply(self, code: int, text: str) -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    with Metadata(("127.0.0.1", 0), _Answer) as server:
        server.pages = {}
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join(5)


CALM = {ACTION: None, PREEMPTED: "FALSE", EVENTS: '{"Events": [{"EventType": "Reboot"}]}'}
TAKEN = {
    ACTION: '{"action": "terminate", "time": "2026-01-01T00:02:00Z"}',
    PREEMPTED: "TRUE\n",
    EVENTS: '{"Events": [{"EventType": "Preempt", "NotBefore": "soon"}]}',
}


@pytest.mark.parametrize(
    ("make", "page"),
    [(AwsNotices, ACTION), (GcpNotices, PREEMPTED), (AzureNotices, EVENTS)],
)
def test_a_notice_is_seen_when_the_cloud_gives_it_and_not_before(
    metadata: Metadata, make: type[AwsNotices | GcpNotices | AzureNotices], page: str
) -> None:
    source = make(metadata.url)
    calm = CALM[page]
    if calm is not None:
        metadata.pages[page] = calm
    assert source.poll_notice() is None
    metadata.pages[page] = TAKEN[page]
    assert source.poll_notice()


@pytest.mark.parametrize("answer", ["[]", "not JSON", '{"Events": 3}', '{"Events": [3]}'])
def test_an_answer_of_the_wrong_form_is_no_notice(metadata: Metadata, answer: str) -> None:
    metadata.pages[EVENTS] = answer
    with pytest.raises(OSError, match="must be a JSON object"):
        AzureNotices(metadata.url).poll_notice()


def test_a_silent_service_is_asked_again() -> None:
    class Wakes(Notices):
        looks = 0

        def poll_notice(self) -> str | None:
            self.looks += 1
            if self.looks < 4:
                raise OSError("no route to host")
            return "soon"

    source = Wakes()
    assert asyncio.run(asyncio.wait_for(until_noticed(source, poll_s=0.01), 5)) == "soon"
    assert source.looks == 4


def test_a_notice_stops_an_actor_as_sigterm_does(metadata: Metadata) -> None:
    async def until_told() -> None:
        stop = asyncio.Event()
        async with stop_at_notice(GcpNotices(metadata.url), stop):
            assert not stop.is_set()
            metadata.pages[PREEMPTED] = TAKEN[PREEMPTED]
            await asyncio.wait_for(stop.wait(), 10)

    metadata.pages[PREEMPTED] = "FALSE"
    asyncio.run(until_told())


def test_without_a_cloud_nobody_is_asked() -> None:
    assert source_of("none") is None
    assert isinstance(source_of("azure"), AzureNotices)
