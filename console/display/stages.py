"""Stages of each process while it starts, and its newest error, read from its log."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .json_lines import JsonLines


class Stages:
    """Follows the logs for lines with the key `stage`, and for the newest error."""

    def __init__(self, logs: Mapping[str, Path]) -> None:
        # Logs of an earlier life are not read again: only what this `nyala up` causes is news.
        self._logs = {name: JsonLines(path) for name, path in logs.items()}
        for follower in self._logs.values():
            follower.skip_to_end()
        self._stages = dict.fromkeys(logs, "starting")
        self._errors: dict[str, str] = {}

    def look(self) -> Mapping[str, str]:
        """Return process name -> stage."""
        for name, follower in self._logs.items():
            for row in follower.read_new():
                if "stage" in row:
                    self._stages[name] = str(row["stage"])
                if row.get("level") in {"error", "critical"}:
                    self._errors[name] = str(row.get("event", ""))
        return self._stages

    def take_error(self, name: str) -> str | None:
        """Return the newest error that a process wrote since the last call."""
        self.look()
        return self._errors.pop(name, None)
