"""A stand-in for an OpenAI-compatible server: it scores a completion by its length."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class JudgeServer(ThreadingHTTPServer):
    """Answers `/v1/chat/completions`; fails and waits as a test tells it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.letters: list[str] = []
        self.failures_left = 0
        self.busiest = 0
        self.at_work = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        """Address up to `/v1`."""
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: JudgeServer

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server, letter = self.server, request["messages"][-1]["content"]
        with server.lock:
            server.letters.append(letter)
            server.at_work += 1
            server.busiest = max(server.busiest, server.at_work)
            fails = server.failures_left > 0
            server.failures_left -= fails
        time.sleep(0.05)
        with server.lock:
            server.at_work -= 1
        if fails:
            self._send(503, {"error": {"message": "overloaded"}})
            return
        completion = letter.partition("ANSWER: ")[2]
        reply = "I cannot say." if completion == "odd" else f"Of 10 I give {len(completion)}."
        self._send(
            200,
            {
                "id": "1",
                "object": "chat.completion",
                "created": 0,
                "model": request["model"],
                "choices": [
                    {
                        "index": 0,
                        "finish_reason": "stop",
                        "message": {"role": "assistant", "content": reply},
                    }
                ],
                "usage": {"prompt_tokens": 20, "completion_tokens": 5, "total_tokens": 25},
            },
        )

    def _send(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Keep the test's output clean."""
