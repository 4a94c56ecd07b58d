"""Sandboxes of either kind, where this machine has them."""

from __future__ import annotations

import pytest

from actors.sandbox import sandbox as module
from actors.sandbox.sandbox import Sandbox
from tests.needs import NEEDS

OTHER_PYTHON = "/usr/bin/python3"  # that all users can read, where ours lies in root's home


def sandbox_of(view: str, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    """Return a sandbox with this view, or skip the test with what is missing."""
    sandbox = Sandbox(view)
    reason = sandbox.why_not()
    if reason:
        monkeypatch.setattr(module, "INTERPRETER", OTHER_PYTHON)
        if Sandbox(view).why_not():
            pytest.skip(f"{NEEDS}{view}: {reason}")
    return sandbox
