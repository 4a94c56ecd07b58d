"""Settings of a run as trackers keep them: one value for each name, and no secret."""

from __future__ import annotations

import json
import re

from configs.settings import Settings

from .tracker import Parameters

CREDENTIALS = re.compile(r"(?<=://)[^@/\s]*@")
"""Name and password in an address."""
SECRET = re.compile(r"password|secret|token$|api_?key", re.IGNORECASE)
"""Names of settings of one's own, such as those of an environment, that are kept out."""
MAX_TEXT = 500  # characters of a value: what MLflow's databases have held from the beginning


def parameters_of(settings: Settings) -> Parameters:
    """List all settings as `table.key`; of a list or a table the JSON."""
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
            key: "***" if SECRET.search(key) else _without_secrets(each)
            for key, each in value.items()
        }
    return [_without_secrets(each) for each in value] if isinstance(value, list) else value
