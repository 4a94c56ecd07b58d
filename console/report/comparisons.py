"""Rows with a text for each run: figures, settings, versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from console.report.record.changed_settings import setting_of
from console.report.record.runs import Run

from .headline import tiles


@dataclass(frozen=True, slots=True)
class Row:
    """What the runs have of one thing."""

    label: str
    cells: Sequence[str]
    default: str = ""

    @property
    def differs(self) -> bool:
        """Whether the runs do not agree."""
        return len(set(self.cells)) > 1


def figure_rows(runs: Sequence[Run]) -> list[Row]:
    """Put the figures of the runs side by side."""
    return [
        Row(same[0].label, [f"{t.value} ({t.note})" if t.note else t.value for t in same])
        for same in zip(*(tiles(run) for run in runs), strict=True)
    ]


def setting_rows(runs: Sequence[Run]) -> list[Row]:
    """List the settings that any run has changed."""
    defaults = {path: default for run in runs for path, (_, default) in run.changed.items()}
    return [
        Row(path, [setting_of(run.settings, path) for run in runs], default)
        for path, default in defaults.items()
    ]


def version_rows(runs: Sequence[Run]) -> list[Row]:
    """List versions of packages, where they were written down."""
    names = dict.fromkeys(name for run in runs for name in run.versions)
    return [Row(name, [_known(run.versions, name) for run in runs]) for name in names]


def _known(versions: Mapping[str, str], name: str) -> str:
    return versions.get(name, "-")
