"""A rule, and what it concludes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from configs.settings import Settings

from .window import Window

Conclusion = Callable[[Window, Settings, bool], str | None]
"""Of the window, the settings, and whether the rule holds already: one sentence, or None. What
holds already ends at a milder threshold than it began at."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One cause of bad training."""

    name: str
    conclude: Conclusion
    batches: int
    """Evidence that it needs before it may conclude anything; 0 = it looks at the store alone, and
    is judged while no batch comes, too."""
    explains: frozenset[str] = frozenset()
    """Rules that are left out while this one holds: it is their cause."""


@dataclass(frozen=True, slots=True)
class Advice:
    """What a rule concludes. Producer: `Advisor`. Consumers: `BatchLog`, the console."""

    rule: str
    text: str
    """Figures, cause and remedy, with the setting to change and its value now."""
