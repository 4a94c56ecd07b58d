"""`lineages.json`: which lineages this run's learners have begun, remembered beside the store.

A store that was rewound or wiped may forget the last ones. Then a new learner must not begin one of
them again: its actors would have seen other weights under the same versions. Written before
anything is published under a new lineage.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from configs.errors import CheckpointError


class LineageFile:
    """The file in the run's folder."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "lineages.json"

    def read(self) -> dict[int, int]:
        """Return lineage -> step it forked at; empty for a new run.

        Raises:
            CheckpointError: The file is not what `write` writes.
        """
        try:
            parsed = json.loads(self._path.read_text(encoding="utf-8"))
            return {int(lineage): int(fork) for lineage, fork in parsed.items()}
        except FileNotFoundError:
            return {}
        except (ValueError, AttributeError, TypeError, OverflowError, RecursionError) as error:
            raise CheckpointError(
                f"{self._path} must map lineages to steps, got: {error}; restore it from a copy, "
                "or begin again with --fresh"
            ) from error

    def write(self, lineages: Mapping[int, int]) -> None:
        """Replace the file; it is durable when this returns."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        with unfinished.open("w", encoding="utf-8") as file:
            json.dump(lineages, file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(self._path)
