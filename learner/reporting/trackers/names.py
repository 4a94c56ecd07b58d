"""Figures and settings of a run under the names that trackers show, without secrets.

Keys of `metrics.jsonl` and `eval.jsonl` get groups and slashes, settings `table.key`. Trackers draw
one section for each first part of a name. Loads without torch.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping

from configs.settings import Settings
from learner.reporting.figures import FIGURES, Figure

from .tracker import Parameters

Line = Mapping[str, object]

UNBOUNDED = ("episodes_by_actor",)
"""Tables of which only the number of entries is a figure: there is no end of actors' names."""
STUTTER = re.compile(r"^(reward|response|policy_lag|reused?|dropped)_")
"""Begin of a key that would repeat the name of its group."""
OF_EVALUATION = ("score", "accuracy", "reward", "parts", "sampled", "environments", "episodes",
    "expected", "off_version", "wall_s")  # fmt: skip
"""Keys of `eval.jsonl` that are figures; all are in the group `eval`."""
OTHER = re.compile(r"[^A-Za-z0-9_.-]")
"""Characters that a part of MLflow's names may not have."""
MAX_PART = 100  # characters: MLflow's names have at most 250, and ours three parts


def _name_of(figure: Figure) -> str:
    if "/" in figure.group or figure.group == figure.key:
        return figure.group
    return f"{figure.group}/{STUTTER.sub('', figure.key)}"


NAMES = {figure.key: _name_of(figure) for figure in FIGURES if figure.group}
"""Key of `metrics.jsonl` -> its name; figures by name have one part more."""


def batch_figures(line: Line) -> dict[str, float]:
    """Name the figures of a line of `metrics.jsonl`."""
    figures: dict[str, float] = {}
    for key, name in NAMES.items():
        value = line.get(key)
        if isinstance(value, list) or (isinstance(value, dict) and key in UNBOUNDED):
            value = len(value)
        figures.update(_flat(name, value))
    return figures


def evaluation_figures(line: Line) -> dict[str, float]:
    """Name the figures of a line of `eval.jsonl`."""
    figures: dict[str, float] = {}
    for key in OF_EVALUATION:
        figures.update(_flat(f"eval/{key}", line.get(key)))
    return figures


def _flat(name: str, value: object) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            part = OTHER.sub("_", str(key))[:MAX_PART]
            yield from _flat(f"{name}/{part.strip('.') or '_'}", inner)
    elif isinstance(value, int | float) and math.isfinite(value):
        yield name, float(value)


# --------------------------------------------------------------------------------------------------
# Settings of a run as trackers keep them: one value for each name, and no secret.

CREDENTIALS = re.compile(r"(?<=://)[^@/\s]*@")
"""Name and password in an address."""
SECRET = re.compile(r"password|secret|token$|api_?key", re.IGNORECASE)
"""Names of settings of one's own, such as those of an environment, that are kept out."""
MAX_TEXT = 500  # characters of a value: what MLflow's databases have held from the beginning


def parameters_of(settings: Settings) -> Parameters:
    """List all settings but `trackers` as `table.key`; of a list or a table the JSON.

    Credentials in addresses, and what looks like a secret in a table, are masked. Long texts are
    cut.
    """
    tree = settings.model_dump(mode="json", exclude={"trackers"})
    return {
        f"{table}.{key}": _plain(value)
        for table, keys in tree.items()
        for key, value in keys.items()
    }


def _plain(value: object) -> str | int | float | bool | None:
    if value is None or isinstance(value, bool | int | float):
        return value
    text = value if isinstance(value, str) else json.dumps(_without_secrets(value))
    return CREDENTIALS.sub("***@", text)[:MAX_TEXT]


def _without_secrets(value: object) -> object:
    if isinstance(value, dict):
        return {
            key: "***" if SECRET.search(key) else _without_secrets(member)
            for key, member in value.items()
        }
    return [_without_secrets(member) for member in value] if isinstance(value, list) else value
