"""Rules of the trackers' addresses; each check returns an error text, or None."""

from __future__ import annotations

import re

from configs.tables.all_tables import AllTables

ADDRESS = re.compile(r"https?://[^\s/?#]+(/[^\s?#]*)?")
VARIABLES = {
    "mlflow": "MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD",
    "trackio": "TRACKIO_WRITE_TOKEN",
}
"""Where the key of a server is read from: never from settings, which are written down."""


def tracker_disagreements(settings: AllTables) -> list[str]:
    """List what is wrong about the trackers, each with what to change."""
    chosen = {"mlflow": settings.trackers.mlflow, "trackio": settings.trackers.trackio}
    checked = [_is_no_address(name, each.url) for name, each in chosen.items() if each is not None]
    return [text for text in checked if text is not None]


def _is_no_address(name: str, url: str) -> str | None:
    if "@" in url or "write_token=" in url:
        return (
            f"trackers.{name}.url must be without passwords and tokens, got one of "
            f"{len(url)} characters; set {VARIABLES[name]} in the environment"
        )
    if not ADDRESS.fullmatch(url):
        return f"trackers.{name}.url must be an address such as http://127.0.0.1:5000, got {url}"
    return None
