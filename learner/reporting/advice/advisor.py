"""The advisor: which rules hold after each batch.

silent --concludes, after `batches` batches--> holds --`CALM` batches without--> silent
"""

from __future__ import annotations

from collections.abc import Sequence

from configs.settings import Settings

from .catalogue import RULES
from .evidence import Evidence, StoreFigures
from .rule import Advice, Rule
from .window import Window

CALM = 3  # a single good batch between bad ones is no recovery


class Advisor:
    """Judges one batch after the other; pure, and in no hurry: its owner has a thread for it.

    Args:
        settings: Of the run; texts name them with their values.
        rules: In the order of the advice: causes before their consequences.
    """

    def __init__(self, settings: Settings, rules: Sequence[Rule] = RULES) -> None:
        self._settings = settings
        self._rules = rules
        self._window = Window()
        self._texts: dict[str, str] = {}
        """Rule that holds -> its newest text."""
        self._calm: dict[str, int] = {}
        """Rule that holds -> batches in a row in which it concluded nothing."""

    def consider(self, evidence: Evidence) -> tuple[Advice, ...]:
        """Take a batch, and return the advice that holds after it."""
        self._window.add(evidence)
        for rule in self._rules:
            self._judge(rule)
        return self._holding()

    def look(self, store: StoreFigures) -> tuple[Advice, ...]:
        """Take what the store shows while no batch comes, and return the advice that holds then."""
        self._window.store = store
        for rule in self._rules:
            if not rule.batches:
                self._judge(rule)
        return self._holding()

    def _holding(self) -> tuple[Advice, ...]:
        explained = {
            name for rule in self._rules if rule.name in self._texts for name in rule.explains
        }
        return tuple(
            Advice(rule.name, self._texts[rule.name])
            for rule in self._rules
            if rule.name in self._texts and rule.name not in explained
        )

    def _judge(self, rule: Rule) -> None:
        if len(self._window) < rule.batches:
            return
        text = rule.conclude(self._window, self._settings, rule.name in self._texts)
        if text is not None:
            self._texts[rule.name] = text
            self._calm[rule.name] = 0
        elif rule.name in self._texts:
            self._calm[rule.name] += 1
            if self._calm[rule.name] == CALM:
                del self._texts[rule.name]
