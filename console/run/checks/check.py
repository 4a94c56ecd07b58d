"""A check of settings or machine, by name, and how a doubt about a run is told from a fault.

A check returns figures, returns a `CheckWarning` about something that does not prevent a run, or
raises an error of one sentence. `nyala up` stops if a check raises; `nyala doctor` goes on to the
next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

GIB = 2**30
MIB = 2**20


class CheckWarning(NamedTuple):
    """What a check found that does not prevent a run."""

    text: str


@dataclass(frozen=True, slots=True)
class Check:
    """One check of settings or machine, with its group and name.

    Example:
        Check("addresses", "broker", lambda: check_endpoint(settings.broker))
    """

    group: str
    name: str
    look: Callable[[], str | CheckWarning]
    """Does the check: returns figures or a doubt, or raises a NyalaError."""
    needs: str = ""
    """Name of an earlier check of its group: if that fails, this one is left out."""
    limit_s: float = 30.0
    """Time limit of the check in `nyala doctor`."""


def sized(num_bytes: float) -> str:
    """Write a number of bytes with its unit.

    Example:
        >>> sized(3 * 2**30), sized(1.5 * 2**20)
        ('3.0 GiB', '1.5 MiB')
    """
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.1f} MiB"
