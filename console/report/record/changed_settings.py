"""Settings of a run that differ from their defaults, by the path with which they are set."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from configs.settings import Settings

REQUIRED = object()
"""Stands for the default of a setting that has none."""


def changed_settings(settings: Settings) -> dict[str, tuple[str, str]]:
    """Return path -> value and default, both written as JSON; an absent default is a dash.

    Example:
        {"learner.lr": ("2e-4", "1e-6")}
    """
    return {
        path: (_written(value), "-" if default is REQUIRED else _written(default))
        for path, value, default in _differences(settings, "")
    }


def setting_of(settings: Settings, path: str) -> str:
    """Return the value of one setting, written as JSON; a dash where this run has no such table."""
    found: Any = settings
    for name in path.split("."):
        if not isinstance(found, BaseModel):
            return "-"
        found = getattr(found, name)
    return _written(found)


def _differences(table: BaseModel, prefix: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield path, value and default of what differs."""
    for name, field in type(table).model_fields.items():
        value = getattr(table, name)
        if isinstance(value, BaseModel):
            yield from _differences(value, f"{prefix}{name}.")
            continue
        is_required = field.is_required()
        default = REQUIRED if is_required else field.get_default(call_default_factory=True)
        if is_required or value != default:
            yield f"{prefix}{name}", value, default


def _written(value: Any) -> str:
    if isinstance(value, str | Path):
        return str(value)
    return json.dumps(value, default=_plain, ensure_ascii=False)


def _plain(value: Any) -> Any:
    """Return what JSON can hold."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_defaults=True)
    return str(value)
