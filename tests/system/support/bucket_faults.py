"""A run whose records and checkpoints are in a bucket that fails: it goes on.

Played by `python -m tests.learner.support.against_moto`. The bucket answers 503 for ten seconds, is
slow, and drops connections, each in the middle of the run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from console.run.redis_server import free_port
from lab.faults.proxy import Proxy
from tests.conftest import running_redis
from tests.system.support.ring_by_hand import RingByHand, assert_one_history

STEPS = 60
REFUSED_S, SLOW_S, CUT_S = 10.0, 8.0, 5.0
PIECE_S = 0.2
"""By which a slow bucket holds back every piece of a request and of its answer."""


class _Refusing(BaseHTTPRequestHandler):
    """Answers every request with 503 SlowDown, as S3 does."""

    protocol_version = "HTTP/1.1"

    def _refuse(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(503)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _refuse

    def log_message(self, *_: object) -> None:
        """Say nothing: `refused` counts."""
        self.server.refused += 1  # type: ignore[attr-defined]


@contextmanager
def _refusing() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Refusing)
    server.refused = 0  # type: ignore[attr-defined]
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # connections are cut
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def check_run(folder: Path, bucket: Proxy, moto_port: int) -> None:
    """Train to the end through the faults; prints the batches trained in each.

    Args:
        folder: Of the run.
        bucket: Through which all processes reach it.
        moto_port: Of the bucket itself.
    """
    with running_redis(folder) as url, _refusing() as refusing:
        ring = _ring(folder, url)
        try:
            ring.start("broker", "broker")
            learner = ring.start("learner", "learner")
            actors = [ring.start(f"actor-{number}", "actors") for number in range(2)]
            ring.until(lambda: ring.version() >= 6, "the run trains")

            def refuse() -> None:
                bucket.lead_to("127.0.0.1", refusing.server_address[1])
                bucket.reset()
                time.sleep(REFUSED_S)
                bucket.lead_to("127.0.0.1", moto_port)
                bucket.reset()

            def be_slow() -> None:
                bucket.delay(PIECE_S)
                time.sleep(SLOW_S)
                bucket.flow()

            def cut() -> None:
                ends_at = time.monotonic() + CUT_S
                while time.monotonic() < ends_at:
                    bucket.reset()
                    time.sleep(0.3)

            for name, harm in (("503", refuse), ("slow", be_slow), ("connections cut", cut)):
                _through(ring, name, harm)
            refused: int = refusing.refused  # type: ignore[attr-defined]
            assert refused, "nothing was asked of the bucket while it refused"
            assert learner.wait(240) == 0, ring.logs()
            assert [actor.wait(60) for actor in actors] == [0, 0], ring.logs()
            assert_one_history(ring, STEPS, "first")
            print(f"a run in the bucket: one life of the learner, {refused} requests refused")
        finally:
            ring.close()


def _through(ring: RingByHand, name: str, harm: Callable[[], None]) -> None:
    before = ring.version()
    harm()
    after = ring.version()
    waited_s = ring.until(lambda: ring.version() >= min(after + 2, STEPS), f"batches after {name}")
    print(f"{name}: {after - before} batches meanwhile, two more {waited_s:.1f} s after it")


def _ring(folder: Path, url: str) -> RingByHand:
    return RingByHand(
        folder,
        url,
        f"broker.endpoint=tcp://127.0.0.1:{free_port()}",
        f"run.steps={STEPS}",
        "run.eval_every=0",
        "run.eval_episodes=0",
        "buffer.object_store=s3://checkpoints/records",
        "buffer.inline_bytes=1024",  # the least; about every second answer is longer
        "run.max_completion_tokens=256",
        "run.max_policy_lag=8",
        "learner.checkpoint_url=s3://checkpoints/runs",
        "learner.checkpoint_every=3",
    )
