"""Folders and buckets by their URL, as fsspec writes it: `file:///folder`, `s3://bucket/folder`.

Used for large records (`object_store.py`) and by the learner for copies of checkpoints.

Buckets of S3, Google Cloud Storage and Azure need the package obstore (the extra `bucket`), or
fsspec's own package for the kind. Credentials and endpoints come from the environment, as each of
these packages reads it (`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL`, ...).
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from importlib import metadata
from typing import Any

import fsspec

from configs.errors import SettingsError
from configs.machine import install_command

filesystem_of: Any = fsspec.core.url_to_fs  # the library gives these no types

BUCKETS = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
"""fsspec's own package by the kind of URL."""
OLDEST = (0, 8)  # of obstore


def filesystem_at(url: str, *, setting: str) -> tuple[Any, str]:
    """Return the filesystem of a URL, and the path in it; nothing is read yet.

    Errors of a bucket are `OSError`s, whichever package is used.

    Raises:
        SettingsError: No installed package has a filesystem for the URL.
    """
    scheme = url.partition("://")[0]
    is_ours = scheme in BUCKETS and _has_obstore(scheme, setting=setting, url=url)
    if is_ours:
        from obstore.fsspec import register  # noqa: PLC0415 - of the extra `bucket`

        register(scheme)
    try:
        files, path = filesystem_of(url)
    except ValueError as error:
        raise SettingsError(
            f"{setting} must be a URL that fsspec knows, got {url!r} ({error}); write "
            "file:///folder or s3://bucket/folder, for example"
        ) from error
    return (OSErrorProxy(files) if is_ours else files), path


def _has_obstore(scheme: str, *, setting: str, url: str) -> bool:
    """Whether obstore is installed; False if only fsspec's own package is.

    Raises:
        SettingsError: Neither package is installed.
    """
    try:
        installed = metadata.version("obstore")
    except metadata.PackageNotFoundError:
        installed = "none"
    if tuple(map(int, re.findall(r"\d+", installed)[:2])) >= OLDEST:
        return True
    if importlib.util.find_spec(BUCKETS[scheme]) is None:
        raise SettingsError(
            f"{setting} must have obstore >= {'.'.join(map(str, OLDEST))} for {url!r}, got "
            f"{installed}; install the extra `bucket`: {install_command('bucket')}"
        )
    return False


class OSErrorProxy:
    """A filesystem of obstore, or a file in it, whose errors are `OSError`s."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        return self._translated(name, value) if callable(value) else value

    def _translated(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        from obstore.exceptions import BaseError  # noqa: PLC0415 - of the extra `bucket`

        def call(*args: Any, **named: Any) -> Any:
            try:
                answer = method(*args, **named)
            except BaseError as error:
                raise OSError(str(error).splitlines()[0]) from error
            return OSErrorProxy(answer) if name == "open" else answer

        return call
