"""Checks that raise, hang or need others: every one gets its line, and none ends the command."""

from __future__ import annotations

import threading

import pytest

from configs.errors import SettingsError
from console.doctor.command import CheckResult, CheckStatus, examine
from console.run.checks.check import Check, CheckWarning


def done(*checks: Check) -> dict[str, CheckResult]:
    return {finding.name: finding for finding in examine(checks)}


def raising(error: BaseException) -> Check:
    def look() -> str:
        raise error

    return Check("g", "raises", look)


def test_every_check_is_done_and_graded_by_what_it_gives():
    found = done(
        raising(SettingsError("x must be 1, got 2; set it")),
        Check("g", "doubtful", lambda: CheckWarning("y should be 1")),
        Check("g", "fine", lambda: "3 of 3"),
    )

    assert [(f.grade, f.text) for f in found.values()] == [
        (CheckStatus.FAILED, "x must be 1, got 2; set it"),
        (CheckStatus.WARNING, "y should be 1"),
        (CheckStatus.OK, "3 of 3"),
    ]


@pytest.mark.parametrize("error", [ZeroDivisionError("by zero"), SystemExit(3)])
def test_whatever_a_check_raises_is_its_failure(error):
    (found,) = examine([raising(error)])

    assert found.grade is CheckStatus.FAILED
    assert f"without an error, got {type(error).__name__}: {error}" in found.text


def test_a_check_that_hangs_fails_at_its_deadline_and_the_next_is_done():
    never = threading.Event()

    found = done(
        Check("g", "hangs", lambda: str(never.wait()), limit_s=0.05),
        Check("g", "next", lambda: "done"),
    )

    never.set()
    assert found["hangs"].grade is CheckStatus.FAILED
    assert "within 0.05 s, got no result" in found["hangs"].text
    assert found["next"].grade is CheckStatus.OK


def test_what_needs_a_failed_check_is_skipped_and_what_needs_that_one_too():
    looked = []

    def look(number):
        looked.append(number)
        return ""

    found = done(
        raising(SettingsError("no")),
        Check("g", "second", lambda: look(2), "raises"),
        Check("g", "third", lambda: look(3), "second"),
        Check("other", "fourth", lambda: "yes", "raises"),
    )

    assert not looked
    assert [found[name].grade for name in ("second", "third")] == [CheckStatus.SKIPPED] * 2
    assert found["second"].text == "raises has to be put right first"
    assert found["fourth"].grade is CheckStatus.OK
