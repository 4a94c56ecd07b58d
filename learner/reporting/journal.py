"""The journal of a run: `metrics.jsonl`, `batches.jsonl`, `eval.jsonl` and `summary.json`.

`metrics.jsonl` and `batches.jsonl` (the groups of each batch) have one line for each batch,
`eval.jsonl` one for each evaluation; `summary.json` is written when the run has finished. Whole
lines are appended, so that only the last line of a crashed process can be incomplete; a resume
removes the lines of the abandoned branch, so that a file holds a single history.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from configs import durable

from .bulletin import Bulletin
from .metrics import Figure


class Journal:
    """Writes the run folder's files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.bulletin = Bulletin()
        """Of what has been appended, and of the lines that `rewind` has kept."""
        folder.mkdir(parents=True, exist_ok=True)

    def append(self, name: str, figures: Mapping[str, object]) -> None:
        """Add a line to `<name>.jsonl`."""
        line = finite(figures)
        with (self._folder / f"{name}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, default=str) + "\n")
        self._tell(name, line)

    def lines(self, name: str) -> list[dict[str, Figure]]:
        """Read `<name>.jsonl`; a line that a crash or the disk damaged is left out."""
        path = self._folder / f"{name}.jsonl"
        if not path.exists():
            return []
        parsed = []
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                figures = json.loads(line)
            except (ValueError, RecursionError):
                continue  # the last line of a killed process, or of a machine that lost its power
            step = figures.get("step") if isinstance(figures, dict) else None
            if isinstance(step, int | float) and not isinstance(step, bool):
                parsed.append(figures)
        return parsed

    def accuracies(self) -> dict[int, float]:
        """Read the held-out accuracy of each evaluation: step -> accuracy."""
        return {
            int(str(line["step"])): float(accuracy)
            for line in self.lines("eval")
            if isinstance(accuracy := line.get("accuracy"), int | float)
        }

    def rewind(self, step: int) -> None:
        """Remove the lines of later steps: the learner resumes after `step`."""
        self.bulletin = Bulletin()
        for name in ("metrics", "batches", "eval"):
            kept = [line for line in self.lines(name) if float(str(line["step"])) <= step]
            text = "".join(json.dumps(line) + "\n" for line in kept)
            self._replace(f"{name}.jsonl", text)
            for line in kept:
                self._tell(name, line)
        (self._folder / "summary.json").unlink(missing_ok=True)

    def summarise(self, summary: Mapping[str, object]) -> None:
        """Write `summary.json`; call it when the run has finished."""
        self._replace("summary.json", json.dumps(summary, indent=2) + "\n")

    def _tell(self, name: str, line: Mapping[str, object]) -> None:
        if name == "metrics":
            self.bulletin.add_batch(line)
        elif name == "eval":
            self.bulletin.add_evaluation(line)

    def _replace(self, name: str, text: str) -> None:
        durable.replace_file(self._folder / name, text)


def finite(figures: Mapping[str, object]) -> dict[str, object]:
    """Replace figures that are not finite, which JSON cannot hold, by None."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in figures.items()
    }
