"""A stand-in for the Hugging Face hub: it takes uploads of models over LFS, and serves them again.

Of the hub's API it has what an upload and a download ask for; Xet's own protocol it has not, so
clients must be told HF_HUB_DISABLE_XET.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_me"
OWNER = "me"
COMMIT = "1" * 40


@dataclass
class Repository:
    """Files by branch; commits in their order."""

    private: bool = False
    branches: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {}})
    commits: list[str] = field(default_factory=list)
    lfs: set[str] = field(default_factory=set)
    """Names of files that came over LFS."""


class ModelHub(ThreadingHTTPServer):
    """Keeps models in memory, on a free loopback port."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    @contextmanager
    def serving(self) -> Iterator[ModelHub]:
        """Serve until the block ends."""
        thread = threading.Thread(target=self.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.shutdown()
            thread.join()
            self.server_close()


class Refused(Exception):
    """A status that is not 200, and the hub's word for it."""

    def __init__(self, status: int, code: str = "") -> None:
        super().__init__(status, code)
        self.status, self.code = status, code


class _Answers(BaseHTTPRequestHandler):
    server: ModelHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Stay quiet."""

    def do_HEAD(self) -> None:
        self._answer(b"")

    def do_GET(self) -> None:
        self._answer(b"")

    def do_PUT(self) -> None:
        self._answer(self._body())

    def do_POST(self) -> None:
        self._answer(self._body())

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _answer(self, body: bytes) -> None:
        path = unquote(urlsplit(self.path).path)
        try:
            found = self._found(path, body)
        except Refused as refused:
            # As the hub does, which names a repository that exists already.
            said = json.dumps({"error": "refused", "url": f"{self.server.url}/me/there"}).encode()
            self._send(refused.status, said, {"X-Error-Code": refused.code})
            return
        if isinstance(found, bytes):
            etag = hashlib.sha256(found).hexdigest()
            self._send(200, found, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})
        else:
            self._send(200, json.dumps(found).encode(), {"Content-Type": "application/json"})

    def _found(self, path: str, body: bytes) -> Any:
        hub = self.server
        if path.startswith("/objects/"):
            if self.command == "PUT":
                hub.objects[path.rpartition("/")[2]] = body
            return {}
        if path == "/api/validate-yaml":
            assert json.loads(body)["content"].startswith("---\n")
            return {"errors": [], "warnings": []}
        if path == "/api/whoami-v2":
            self._authenticated()
            return {"name": OWNER, "orgs": [{"name": "ours"}]}
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path.endswith(".git/info/lfs/objects/batch"):
            self._write(path.removeprefix("/").partition(".git/")[0])
            return {"objects": [self._lfs_object(each) for each in json.loads(body)["objects"]]}
        if path.startswith("/api/models/"):
            owner, name, verb, rest = (path.removeprefix("/api/models/") + "///").split("/", 3)
            return self._api(f"{owner}/{name}", verb, rest.rstrip("/"), body)
        if path in {"", "/"}:  # whether somebody is there
            return b""
        owner, name, _, branch, file = path.removeprefix("/").split("/", 4)
        files = self._read(f"{owner}/{name}").branches[branch if branch != COMMIT else "main"]
        if file not in files:
            raise Refused(404, "EntryNotFound")
        return files[file]

    def _create(self, asked: Mapping[str, Any]) -> Any:
        name = f"{asked['organization']}/{asked['name']}"
        self._authenticated()
        if asked["organization"] != OWNER:
            raise Refused(403)
        if name in self.server.repositories:
            raise Refused(409)
        is_private = asked.get("visibility") == "private"
        self.server.repositories[name] = Repository(private=is_private)
        return {"url": f"{self.server.url}/{name}"}

    def _api(self, name: str, verb: str, branch: str, body: bytes) -> Any:
        repository = self._read(name) if self.command == "GET" else self._write(name)
        if verb == "branch":
            repository.branches.setdefault(branch, dict(repository.branches["main"]))
            return {}
        branch, _, below = branch.partition("/")
        files = repository.branches[branch if verb in ("preupload", "commit", "tree") else "main"]
        if verb == "tree" and below:
            raise Refused(404, "EntryNotFound")
        if verb == "tree":
            return [
                {"type": "file", "path": each, "size": len(content), "oid": "0" * 40}
                for each, content in files.items()
            ]
        if verb == "preupload":
            asked = json.loads(body)["files"]
            return {"files": [_mode(each["path"]) for each in asked]}
        if verb == "commit":
            self._commit(repository, files, body)
            return {"commitUrl": f"{self.server.url}/{name}/commit/{COMMIT}", "commitOid": COMMIT}
        siblings = [{"rfilename": each} for each in files]
        sha = {"sha": COMMIT, "private": repository.private, "siblings": siblings}
        return {"id": name, **sha}

    def _commit(self, repository: Repository, files: dict[str, bytes], body: bytes) -> None:
        for line in body.splitlines():
            operation = json.loads(line)
            value = operation["value"]
            match operation["key"]:
                case "header":
                    repository.commits.append(value["summary"])
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    files[value["path"]] = self.server.objects[value["oid"]]
                    repository.lfs.add(value["path"])
                case "deletedFile":
                    del files[value["path"]]

    def _lfs_object(self, asked: Mapping[str, Any]) -> Any:
        href = f"{self.server.url}/objects/{asked['oid']}"
        return {**asked, "actions": {"upload": {"href": href}, "verify": {"href": href}}}

    def _authenticated(self) -> None:
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise Refused(401)

    def _read(self, name: str) -> Repository:
        if name not in self.server.repositories:
            raise Refused(404, "RepoNotFound")
        return self.server.repositories[name]

    def _write(self, name: str) -> Repository:
        self._authenticated()
        if not name.startswith(f"{OWNER}/"):
            raise Refused(403)
        return self._read(name)

    def _send(self, status: int, content: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _mode(path: str) -> dict[str, object]:
    """The hub's own rule for models: what is large is in LFS."""
    return {
        "path": path,
        "uploadMode": "lfs" if path.endswith(".safetensors") else "regular",
        "shouldIgnore": False,
        "oid": None,
    }
