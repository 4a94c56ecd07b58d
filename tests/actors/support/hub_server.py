"""A stand-in for the Hugging Face hub: it serves one dataset to the real clients."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubServer(ThreadingHTTPServer):
    """Serves the files of `owner/name` on a free loopback port, and nothing else."""

    daemon_threads = True

    def __init__(self, name: str, files: Mapping[str, str]) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.name = name
        self.files = {path: text.encode() for path, text in files.items()}
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Answers(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer(asked)

    def log_message(self, *_: object) -> None:
        """Stay quiet."""

    def _answer(self, asked: bytes = b"") -> None:
        path, hub = unquote(urlsplit(self.path).path), self.server
        hub.asked.append(f"{self.command} {path}")
        api, files = f"/api/datasets/{hub.name}", f"/datasets/{hub.name}/resolve/"
        if path.startswith(files):
            self._file(path.removeprefix(files).partition("/")[2])
        elif path.startswith(f"{api}/paths-info/"):
            wanted = json.loads(asked)["paths"] if asked.startswith(b"{") else []
            self._json([_entry(each, hub.files[each]) for each in wanted if each in hub.files])
        elif path.startswith(f"{api}/tree/"):
            inside = path.removeprefix(f"{api}/tree/").partition("/")[2]
            found = [each for each in hub.files if each.startswith(f"{inside}/" if inside else "")]
            if not found:
                self._missing("EntryNotFound")
            else:
                self._json([_entry(each, hub.files[each]) for each in found])
        elif path == api or path.startswith(f"{api}/revision/"):
            siblings = [{"rfilename": each} for each in hub.files]
            self._json({"id": hub.name, "sha": COMMIT, "siblings": siblings})
        else:
            self._missing("RepoNotFound")

    def _file(self, name: str) -> None:
        content = self.server.files.get(name)
        if content is None:
            self._missing("EntryNotFound")
            return
        self._send(200, content, {"ETag": f'"{_digest(content)}"'})

    def _json(self, found: Any) -> None:
        self._send(200, json.dumps(found).encode(), {"Content-Type": "application/json"})

    def _missing(self, code: str) -> None:
        self._send(404, b"{}", {"X-Error-Code": code})

    def _send(self, status: int, content: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(content)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _entry(path: str, content: bytes) -> dict[str, object]:
    return {"type": "file", "path": path, "size": len(content), "oid": _digest(content)}


def _digest(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()
