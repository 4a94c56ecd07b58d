"""Catalogue of what the settings of the loss choose by name, for `nyala losses` and the docs.

    registries -> Entry (name, formula, use, paper, defaults) -> `nyala losses`, docs

Every function in a registry has the sections `Formula`, `Use` and `Source` in its docstring; the
settings it reads are those that its code, summary or formula name. So a new line in a registry is a
new line here without further registration. Functions of the user may have these sections too.
`methods.py` combines choices to published methods.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from configs.errors import SettingsError
from configs.settings import AlgorithmSettings, CriticSettings

from .advantages import ADVANTAGES
from .aggregations import AGGREGATIONS
from .corrections import CORRECTIONS
from .losses import PROXIMALS
from .surrogates import SURROGATES
from .user_losses import load_loss, packaged_losses

SECTION = re.compile(r"^(Formula|Kind|Use|Source):$", re.MULTILINE)
WORD = re.compile(r"\w+(?:\.\w+)?")


@dataclass(frozen=True, slots=True)
class ChoiceSetting:
    """One of the settings that take a name."""

    setting: str
    """Name of the setting, such as `algorithm.correction`."""
    registry: Mapping[str, Callable[..., Any]]

    @property
    def meaning(self) -> str:
        """Description of the setting in its table."""
        field = AlgorithmSettings.model_fields[self.setting.removeprefix("algorithm.")]
        return " ".join((field.description or "").split())


CHOICES = (
    ChoiceSetting("algorithm.advantage", ADVANTAGES),
    ChoiceSetting("algorithm.correction", CORRECTIONS),
    ChoiceSetting("algorithm.surrogate", SURROGATES),
    ChoiceSetting("algorithm.proximal", PROXIMALS),
    ChoiceSetting("algorithm.aggregation", AGGREGATIONS),
)


@dataclass(frozen=True, slots=True)
class Entry:
    """Description of one name that a setting takes."""

    setting: str
    name: str
    summary: str
    """The effect of this choice, in one or a few sentences."""
    formula: str
    kind: str
    """Unit it works on, such as tokens or sequences, where a choice has both."""
    use: str
    """Circumstances in which to choose it."""
    source: str
    """Paper and section."""
    defaults: Mapping[str, object]
    """Settings that it reads, with their defaults."""


def entries() -> list[Entry]:
    """Describe every name of every choice, in the order of the registries."""
    return [
        describe(choice.setting, name, function)
        for choice in CHOICES
        for name, function in choice.registry.items()
    ]


def packaged_entries() -> list[Entry]:
    """Describe what installed packages register; one that cannot be imported says why."""
    described = []
    for kind, points in packaged_losses().items():
        setting = f"algorithm.{kind}"
        for name in points:
            try:
                described.append(describe(setting, name, load_loss(kind, name)))
            except SettingsError as error:
                described.append(Entry(setting, name, str(error), "", "", "", "", {}))
    return described


def describe(setting: str, name: str, function: Callable[..., Any]) -> Entry:
    """Read the docstring of a function that a setting takes by this name."""
    head, *rest = SECTION.split(inspect.getdoc(function) or "")
    titles, texts = rest[::2], [" ".join(text.split()) for text in rest[1::2]]
    sections = dict(zip(titles, texts, strict=True))
    summary, formula = " ".join(head.split()), sections.get("Formula", "")
    code = getattr(function, "__code__", None)  # a function of a package may be any callable
    words = {*(code.co_names if code else ()), *WORD.findall(formula), *WORD.findall(summary)}
    # Some names have bounds of their own, which stand where none are given.
    chosen = AlgorithmSettings.model_validate({setting.removeprefix("algorithm."): name})
    tables = {"algorithm": chosen, "critic": CriticSettings()}
    return Entry(
        setting=setting,
        name=name,
        summary=summary,
        formula=formula,
        kind=sections.get("Kind", ""),
        use=sections.get("Use", ""),
        source=sections.get("Source", ""),
        defaults={
            f"{table}.{key}": value
            for table, values in tables.items()
            for key, value in values
            if f"{table}.{key}" in words or (table == "algorithm" and key in words)
        },
    )
