"""Requirements of trackers on a machine: one sentence where something is missing."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

from configs.errors import SettingsError

from .http_api import RefusedCall


def require_package(name: str) -> None:
    """Refuse a tracker without its package.

    Raises:
        SettingsError: It is not installed.
    """
    if importlib.util.find_spec(name) is None:
        raise SettingsError(
            f"trackers.{name} must have the package {name}, which is not installed; `pip install "
            f"{name}` into Nyala's environment, or install it with the extra `{name}`"
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
            f"start it, or leave it out with trackers.{name}=null"
        ) from None
