"""A fault, its measured result, and the table of results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .fault_case import FaultCase

HEADER = (
    "fault",
    "detected after",
    "recovered after",
    "tokens kept",
    "attempts charged",
    "invariants",
)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of the matrix."""

    name: str
    what: str
    """Written for the table."""
    act: Callable[[FaultCase], None]
    """Injects it and waits for the recovery."""
    obstacle: Callable[[], str | None] = lambda: None
    """Why it cannot be done here; None = it can."""
    place: Callable[[Path], AbstractContextManager[Mapping[str, str]]] | None = None
    """Surroundings of a run of its own, given a folder: yields variables for the processes.
    None = any run will do."""
    overrides: tuple[str, ...] = ()
    """Settings of that run."""


@dataclass(slots=True)
class FaultResult:
    """Measurements of one fault: a row of the table."""

    name: str
    what: str
    detected_s: float | None = None
    """From the fault to the first reaction; None = no reaction was needed."""
    recovered_s: float | None = None
    """From the fault, or from its end where it lasts, until all work goes on."""
    tokens_kept: float | None = None
    """Share of the tokens made before the fault that were gone on with."""
    tasks: int = 0
    """Unfinished episodes that the fault was about."""
    charged: int = 0
    """Of them, those that were charged an attempt."""
    violations: list[str] = field(default_factory=list)
    remark: str = ""
    skipped: str | None = None
    error: str | None = None

    @property
    def holds(self) -> bool:
        """True if the run recovered and every invariant held."""
        return not self.violations and self.error is None

    def cells(self) -> tuple[str, ...]:
        """Write it for the table."""
        if self.skipped is not None:
            return (self.what, "-", "-", "-", "-", f"not run: {self.skipped}")
        verdict = (
            "hold" if self.holds else "; ".join([*self.violations, *filter(None, [self.error])])
        )
        kept = "-" if self.tokens_kept is None else f"{self.tokens_kept:.1%}"
        charged = f"{self.charged} of {self.tasks}" if self.tasks else "-"
        times = (_seconds(self.detected_s), _seconds(self.recovered_s))
        what = f"{self.what} ({self.remark})" if self.remark else self.what
        return (what, *times, kept, charged, verdict)


def markdown(rows: Sequence[FaultResult]) -> str:
    """Write the rows as a table."""
    lines = [HEADER, tuple("---" for _ in HEADER), *(row.cells() for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def as_json(rows: Sequence[FaultResult]) -> list[dict[str, object]]:
    """Write the rows for a program."""
    return [_object(row) for row in rows]


def _object(row: FaultResult) -> dict[str, object]:
    return {**asdict(row), "holds": row.holds}


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"
