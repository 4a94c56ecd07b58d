"""Rules of the addresses of servers that get a run's figures, texts or traces."""

from __future__ import annotations

import re

from configs.tables.all_tables import AllTables

ADDRESS = re.compile(r"https?://[^\s/?#]+(/[^\s?#]*)?")
EXAMPLES = {
    "trackers.mlflow.url": "http://127.0.0.1:5000",
    "trackers.trackio.url": "http://127.0.0.1:7860",
    "run.tracing.endpoint": "http://127.0.0.1:4318",
}
VARIABLES = {
    "trackers.mlflow.url": "MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and "
    "MLFLOW_TRACKING_PASSWORD",
    "trackers.trackio.url": "TRACKIO_WRITE_TOKEN",
    "run.tracing.endpoint": "OTEL_EXPORTER_OTLP_HEADERS",
}
"""Where the key of a server is read from: never from settings, which are written down."""


def server_disagreements(settings: AllTables) -> list[str]:
    """List what is wrong about the servers, each with what to change."""
    mlflow, trackio = settings.trackers.mlflow, settings.trackers.trackio
    chosen = {
        "trackers.mlflow.url": mlflow.url if mlflow else None,
        "trackers.trackio.url": trackio.url if trackio else None,
        "run.tracing.endpoint": settings.run.tracing.endpoint,
    }
    checked = [_is_no_address(name, url) for name, url in chosen.items() if url is not None]
    return [text for text in checked if text is not None]


def _is_no_address(name: str, url: str) -> str | None:
    if "@" in url or "?" in url or "write_token=" in url:
        return (
            f"{name} must be without passwords and tokens, got one of "
            f"{len(url)} characters; set {VARIABLES[name]} in the environment"
        )
    if not ADDRESS.fullmatch(url):
        return f"{name} must be an address such as {EXAMPLES[name]}, got {url}"
    return None
