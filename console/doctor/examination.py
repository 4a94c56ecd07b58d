"""Checks under deadlines, one after the other, none of which can end the command.

look ──returns figures──▶ ok
──returns a Doubt──▶ warning
──raises, or exceeds its limit──▶ failed ──▶ those that need it are skipped
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from configs.errors import NyalaError
from configs.worker import Worker
from console.run.checks.check import Check, Doubt


class Grade(StrEnum):
    """Outcome of a check."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """A check that has been done."""

    group: str
    name: str
    grade: Grade
    text: str
    """Figures, or what is wrong and the next step."""
    seconds: float


def examine(
    checks: Sequence[Check], *, begins: Callable[[Check], None] = lambda _check: None
) -> Iterator[Finding]:
    """Do the checks in their order.

    Args:
        checks: Each after those that it needs.
        begins: Called before each.
    """
    lost: set[tuple[str, str]] = set()
    for check in checks:
        if (check.group, check.needs) in lost:
            lost.add((check.group, check.name))
            text = f"{check.needs} has to be put right first"
            yield Finding(check.group, check.name, Grade.SKIPPED, text, 0.0)
            continue
        begins(check)
        began = time.monotonic()
        grade, text = _look(check)
        if grade is Grade.FAILED:
            lost.add((check.group, check.name))
        yield Finding(check.group, check.name, grade, text, time.monotonic() - began)


def _look(check: Check) -> tuple[Grade, str]:
    """Do one check in a thread, which is left behind where it does not end."""
    found: list[tuple[Grade, str]] = []
    worker = Worker(lambda: found.append(_outcome(check)), name=f"check-{check.name}").start()
    worker.join(check.limit_s)
    if found:
        return found[0]
    return Grade.FAILED, (
        f"{check.name} must be checked within {check.limit_s:g} s, got no end; look at what it "
        f"waits for: a network, a disk, or code of yours"
    )


def _outcome(check: Check) -> tuple[Grade, str]:
    try:
        answer = check.look()
    except NyalaError as error:
        return Grade.FAILED, str(error)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - code of the user may raise anything
        reason = f"{type(error).__name__}: {error}".rstrip(": ")
        return Grade.FAILED, f"{check.name} must be checked without an error, got {reason}"
    return (Grade.WARNING, answer.text) if isinstance(answer, Doubt) else (Grade.OK, answer)
