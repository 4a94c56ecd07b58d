"""The URL of Redis, with its password: never in `config.yaml` or on a command line."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from configs.tables.buffer import BufferSettings
from configs.tables.run import RunSettings

from . import durable
from .errors import SettingsError

VARIABLE = "NYALA_REDIS_URL"
FILE_VARIABLE = "NYALA_REDIS_URL_FILE"
"""Names a file with the URL: what container platforms mount as a secret."""
FILE_NAME = "redis.url"


def redis_url(
    run: RunSettings, buffer: BufferSettings, environ: Mapping[str, str] = os.environ
) -> str:
    """Find the URL of this run's Redis: the environment, then the run folder, then `buffer.url`.

    Raises:
        SettingsError: None of the three has one, or the file of one cannot be read.
    """
    url = redis_url_of(environ)
    if url is not None:
        return url
    file = run.folder / FILE_NAME
    if file.exists():
        return _read_url(file, f"{file} must be a file that this process can read")
    if buffer.url is not None:
        return buffer.url
    raise SettingsError(
        f"buffer.url must be the URL of a Redis server, got null, and there is no {file}; "
        f"start the run with `nyala up`, or set {VARIABLE}"
    )


def redis_url_of(environ: Mapping[str, str] = os.environ) -> str | None:
    """Read the URL from `NYALA_REDIS_URL` or the file that `NYALA_REDIS_URL_FILE` names.

    None if neither variable is set.

    Raises:
        SettingsError: The file cannot be read.
    """
    if environ.get(VARIABLE):
        return environ[VARIABLE]
    if environ.get(FILE_VARIABLE):
        file = Path(environ[FILE_VARIABLE])
        return _read_url(file, f"{FILE_VARIABLE} must name a file that this process can read")
    return None


def _read_url(file: Path, rule: str) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise SettingsError(
            f"{rule}, got {file}: {error.strerror}; check that the file is there and belongs to "
            "this user"
        ) from None


def write_secret(path: Path, text: str) -> None:
    """Write a file that only this user can read, from its first moment on."""
    durable.replace_file(path, text + "\n", mode=0o600)
