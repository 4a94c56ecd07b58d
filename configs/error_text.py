"""Errors of settings in words: path, allowed values, given value, and the setting probably meant.

Owns the wording and the guesses. Ranges are read from the JSON schema of the settings, so that they
are written down once.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from .aliases import LEFT_OUT, owner_of
from .settings import Settings

Schema = dict[str, Any]
"""A JSON schema, or a part of one."""

NOUNS = {
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "boolean": "true or false",
    "object": "a table",
    "null": "null",
}
BOUNDS = {
    "minimum": ">=",
    "exclusiveMinimum": ">",
    "maximum": "<=",
    "exclusiveMaximum": "<",
    "multipleOf": "a multiple of",
}
PATTERNS = {
    r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$": "a word of letters, digits, `_`, `.` and `-`",
    r"^tcp://.+:\d+$": "an address such as tcp://127.0.0.1:5757",
    r"^(\[[0-9A-Fa-f:]+\]|[^\s/:\[\]]+)(:\d{1,5})?$": "a host or host:port, such as hub:5758",
    r"^http://[^/]+:\d+$": "an address such as http://127.0.0.1:9470",
}
"""Regular expressions of the schema in words."""


def describe_all(error: ValidationError) -> list[str]:
    """Word every problem that pydantic found, in the order of the file."""
    lines: dict[
        str, None
    ] = {}  # a union reports one problem for each of its branches; we word the setting once
    for detail in error.errors(include_url=False):
        for line in _describe(detail):
            lines[line] = None
    return list(lines)


def unknown_key(path: Sequence[str], value: object) -> str:
    """Report that a key is not one of ours, and suggest one."""
    known = _properties()
    where = "$." + ".".join(path)
    if path[-1] in LEFT_OUT:
        return f"{where} {LEFT_OUT[path[-1]]}"
    if own_keys := _keys_below(path[:-1]):
        near = difflib.get_close_matches(path[-1], own_keys, n=1, cutoff=0.75)
        then = f"did you mean {near[0]}?" if near else f"its keys are {', '.join(own_keys)}"
        return f"{where} is not a setting, got {_show(value)}; {then}"
    guess = suggest(path)
    if guess is not None:
        return f"{where} is not a setting, got {_show(value)}; did you mean {guess}?"
    table = path[0]
    if len(path) > 1 and any(own.startswith(f"{table}.") for own in known):
        keys = ", ".join(own.partition(".")[2] for own in known if own.startswith(f"{table}."))
        return f"{where} is not a setting, got {_show(value)}; {table} has {keys}"
    tables = ", ".join(dict.fromkeys(own.partition(".")[0] for own in known))
    return f"{where} is not a setting, got {_show(value)}; the tables are {tables}"


def suggest(path: Sequence[str]) -> str | None:
    """Guess which of our settings an unknown path means.

    First a slip of the pen in the same table, then the same key in another table, then a peer's
    name, then anything close.
    """
    known = list(_properties())
    table, key = (path[0] if len(path) > 1 else ""), path[-1].lower().replace("-", "_")
    near = difflib.get_close_matches(
        key,
        [own.partition(".")[2] for own in known if own.startswith(f"{table}.")],
        n=1,
        cutoff=0.75,
    )
    if table and near:
        return f"{table}.{near[0]}"
    homes = [own for own in known if own.partition(".")[2] == key]
    if len(homes) == 1:
        return homes[0]
    alias = owner_of(".".join(path))
    if alias is not None:
        return alias
    if len(homes) > 1:
        return " or ".join(homes)
    close = difflib.get_close_matches(".".join([*path[:-1], key]), known, n=1, cutoff=0.8)
    if not close:
        close = difflib.get_close_matches(
            key, [own.partition(".")[2] for own in known], n=1, cutoff=0.8
        )
        close = [own for own in known if close and own.endswith(f".{close[0]}")][:1]
    return close[0] if close else None


def allowed(path: str) -> str:
    """Describe the allowed values of a setting, such as `a whole number >= 1`.

    Args:
        path: `table.key`, or deeper, such as `run.environments.0.share`.
    """
    return _constraint(_schema(path.split(".")) or {})


def meaning(path: str) -> str:
    """Give the first sentence of what a setting is for; its path is as for `allowed`."""
    text = str((_schema(path.split(".")) or {}).get("description", "")).replace("\n", " ")
    return text.partition(". ")[0].rstrip(".")


def _describe(detail: ErrorDetails) -> Iterator[str]:
    path = tuple(str(part) for part in detail["loc"])
    kind, value = detail["type"], detail["input"]
    if kind == "extra_forbidden":
        for leaf, inner in _leaves(path, value):
            yield unknown_key(leaf, inner)
        return
    if kind == "missing":
        yield from _missing(path)
        return
    # Of a union, the path goes on with the name of a branch.
    known = [path[:end] for end in range(len(path), 1, -1) if _schema(path[:end])]
    if known:
        own = ".".join(known[0])
        about = f"; it is: {meaning(own)}" if meaning(own) else ""
        yield f"$.{own} must be {allowed(own)}, got {_show(value)}{about}"
    elif len(path) == 1:
        yield f"$.{path[0]} must be a table of keys, got {_show(value)}"
    else:
        # The checks across tables: their text already names what is wrong and what follows.
        yield "$." + str(detail["msg"]).removeprefix("Value error, ")


def _missing(path: tuple[str, ...]) -> Iterator[str]:
    if len(path) == 1:
        required = [own for own in _required() if own.startswith(f"{path[0]}.")]
        yield from (_missing_key(own) for own in required)
    else:
        yield _missing_key(".".join(path))


def _missing_key(own: str) -> str:
    return f"$.{own} must be {allowed(own)}, got nothing; it is: {meaning(own)}"


def _leaves(path: tuple[str, ...], value: object) -> Iterator[tuple[tuple[str, ...], object]]:
    """List the single settings below an unknown key: a peer's file is nested deeper than ours."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves((*path, str(key)), inner)
    else:
        yield path, value


def _constraint(schema: Schema) -> str:
    if "anyOf" in schema:
        return " or ".join(_constraint(branch) for branch in schema["anyOf"])
    if "enum" in schema:
        return "one of " + ", ".join(str(choice) for choice in schema["enum"])
    if "const" in schema:
        return str(schema["const"])
    if "pattern" in schema:
        return PATTERNS.get(schema["pattern"], f"text like {schema['pattern']}")
    if schema.get("format") == "path":
        return "a path"
    kind = str(_resolved(schema).get("type"))
    if kind == "array":
        return _list_of(schema)
    noun = NOUNS.get(kind, "a value")
    bounds = [f"{sign} {_number(schema[key])}" for key, sign in BOUNDS.items() if key in schema]
    return f"{noun} {' and '.join(bounds)}".rstrip()


def _list_of(schema: Schema) -> str:
    if "prefixItems" in schema:
        return (
            f"a list of {len(schema['prefixItems'])}, each {_constraint(schema['prefixItems'][0])}"
        )
    return f"a list, each {_constraint(schema.get('items', {}))}"


def _number(bound: float) -> str:
    return str(int(bound)) if float(bound).is_integer() else str(bound)


def _show(value: object) -> str:
    """Write a value as in YAML, short."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."


@cache
def _whole() -> Schema:
    return Settings.model_json_schema()


@cache
def _properties() -> dict[str, Schema]:
    """The schema of every `table.key`, in the order of the settings."""
    return {
        f"{table}.{key}": part
        for table, reference in _whole()["properties"].items()
        for key, part in _resolved(reference)["properties"].items()
    }


def _schema(path: Sequence[str]) -> Schema | None:
    """The schema of a setting, or of what is below one; None if there is no such."""
    found = _properties().get(".".join(path[:2]))
    for part in path[2:]:
        own = _resolved(_table_in(found or {}))
        found = own.get("items") if part.isdigit() else own.get("properties", {}).get(part)
    return found


def _table_in(schema: Schema) -> Schema:
    """Of a table or null, the table; anything else as it is."""
    branches: list[Schema] = schema.get("anyOf", [])
    return next((branch for branch in branches if "$ref" in branch), schema)


def _resolved(schema: Schema) -> Schema:
    name = str(schema.get("$ref", "")).rpartition("/")[2]
    return _whole()["$defs"][name] if name else schema


def _keys_below(path: Sequence[str]) -> list[str]:
    """The keys of a table within a setting."""
    schema = _schema(path) if len(path) > 2 else None
    return list(_resolved(_table_in(schema or {})).get("properties", {}))


@cache
def _required() -> list[str]:
    """Every `table.key` that has no default."""
    return [
        f"{table}.{key}"
        for table, reference in _whole()["properties"].items()
        for key in _resolved(reference).get("required", [])
    ]
