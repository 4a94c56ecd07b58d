"""JSON over HTTP for trackers: calls with a deadline and one try, and checks before a run."""

from __future__ import annotations

import http.client
import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from configs.errors import NyalaError, SettingsError
from configs.machine import install_command

TIMEOUT_S = 15.0  # of an answer, and of each part of a file
MAX_ANSWER = 4 * 2**20  # bytes
JSON, FILE = "application/json", "application/octet-stream"
PASSING = {401, 403, 408, 425, 429}
"""Codes after which the same call may succeed: a key that is being renewed, a busy server."""


class RefusedCall(NyalaError):
    """A server refuses a call, and would refuse it again."""

    def __init__(self, status: int, code: str, text: str) -> None:
        super().__init__(text)
        self.status = status
        """HTTP status of the answer."""
        self.code = code
        """Code of the server's API, such as `RESOURCE_ALREADY_EXISTS`; may be empty."""


class HttpApi:
    """The HTTP API of a tracker's server.

    Args:
        url: Address of the server.
        headers: Headers of every request.
    """

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self._url, self._headers = url.rstrip("/"), dict(headers)

    def get(self, path: str) -> dict[str, Any]:
        """Read an object from the server.

        Raises:
            OSError: The server is away or busy, refuses the credentials, or does not speak HTTP.
            RefusedCall: The server answers that the request is wrong.
        """
        return self._call("GET", path, None, {})

    def post(self, path: str, body: Mapping[str, object]) -> dict[str, Any]:
        """Send an object; raises as `get`."""
        return self._call("POST", path, json.dumps(body).encode(), {"Content-Type": JSON})

    def put_bytes(self, path: str, content: bytes) -> None:
        """Send a small file; raises as `get`."""
        self._call("PUT", path, content, {"Content-Type": FILE})

    def put_file(self, path: str, file: Path, on_progress: Callable[[], None]) -> None:
        """Send a file of any size in parts; raises as `get`."""
        size = str(file.stat().st_size)
        with file.open("rb") as opened:
            parts = _Parts(opened, on_progress)
            self._call("PUT", path, parts, {"Content-Type": FILE, "Content-Length": size})

    def _call(
        self, method: str, path: str, body: Any, headers: Mapping[str, str]
    ) -> dict[str, Any]:
        url = f"{self._url}/{path}"
        request = Request(url, body, {**self._headers, **headers}, method=method)  # noqa: S310 - http(s), as settings ask
        try:
            with urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310 - as above
                return _object(answer.read(MAX_ANSWER))
        except HTTPError as error:
            with error:
                told = _object(error.read(MAX_ANSWER))
            text = f"{method} {url}: {error.code} {_reason(told, error)}"
            if error.code in PASSING or error.code >= 500:
                raise OSError(text) from None
            raise RefusedCall(error.code, str(told.get("error_code", "")), text) from None
        except http.client.HTTPException as error:
            raise OSError(f"{url} does not speak HTTP: {error!r}") from None


class _Parts:
    """A file that reports when a part of it is read to be sent."""

    def __init__(self, file: BufferedReader, on_read: Callable[[], None]) -> None:
        self._file, self._on_read = file, on_read

    def read(self, size: int) -> bytes:
        self._on_read()
        return self._file.read(size)


def _object(text: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(text)
    except ValueError:  # nothing, or a page for people
        return {}
    return answer if isinstance(answer, dict) else {}


def _reason(told: Mapping[str, Any], error: HTTPError) -> str:
    reason = told.get("message") or told.get("error") or error.reason
    return str(reason).partition("\n")[0]


# --------------------------------------------------------------------------------------------------
# Requirements of trackers on a machine: one sentence where something is missing.


def require_package(name: str) -> None:
    """Refuse a tracker without its package.

    Raises:
        SettingsError: The package is not installed.
    """
    if importlib.util.find_spec(name) is None:
        raise SettingsError(
            f"trackers.{name} must have the package {name}, which is not installed; install "
            f"the extra `{name}`: {install_command(name)}"
        )


@contextmanager
def naming_server(name: str, url: str) -> Iterator[None]:
    """Name the setting of a server that does not answer as it should.

    Raises:
        SettingsError: A call of the body failed.
    """
    try:
        yield
    except (OSError, RefusedCall) as error:
        raise SettingsError(
            f"trackers.{name}.url must be a server of {name} that answers, got {url} ({error}); "
            f"start it, correct the address or its credentials, or leave it out with "
            f"trackers.{name}=null"
        ) from None
