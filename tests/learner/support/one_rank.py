"""The ranks of a learner that has one, for tests without a process group."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

ALONE: Any = SimpleNamespace(is_first=True, rank=0, control=None, barrier=lambda: None)
