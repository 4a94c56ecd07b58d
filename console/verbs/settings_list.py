"""All settings, as lines of a terminal and as docs/settings.md."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, get_args

from pydantic import TypeAdapter
from pydantic.fields import FieldInfo

from configs.error_text import allowed, suggest
from configs.errors import SettingsError
from configs.markdown import table
from configs.settings import Settings
from configs.tables.base import SettingsTable

UNITS = (
    (r"_s$", "s"),
    (r"_minutes$", "min"),
    (r"_mb(_per_actor)?$", "MiB"),
    (r"_gib$", "GiB"),
    (r"_bytes$", "bytes"),
    (r"_tokens$|max_model_len$", "tokens"),
    (r"probe_tolerance$", "nats"),
    (r"(_kl|entropy_target|kl_target)$", "nats per token"),
    (r"second_moment$", "nats²"),
    (r"warm_start_steps$", "optimizer steps"),
    (r"_batches$|_every$|_lag$|[._]steps$|\.every$|in_a_row$", "batches"),
    (r"(episodes|in_flight|group_size|\.capacity)$", "episodes"),
    (r"groups(_per_batch)?$", "groups"),
    (r"_batch$|pass_k$|eval_samples$", "answers"),
    (r"(actors\.count|max_actors(_per_\w+)?)$", "actors"),
    (r"[._]ranks$|parallel\.(shard|sequence|tensor)$", "ranks"),
    (r"tensor_parallel_size$", "workers"),
    (r"replicate$", "copies"),
    (r"_(attempts|failures|retries|restarts|rollbacks|epochs|minibatches)$", r"\1"),
    (r"[._](workers|threads|layers|checkpoints)$", r"\1"),
)
"""Pattern of a setting's name -> its unit; the first that fits. All others are plain numbers."""
HEAD = """\
# Settings

Every setting of a run, with its unit (no unit: a plain number or no number at all), the values
that are allowed, its default, and when to change it. Settings are written into a YAML file as
`table: {key: value}`, or on the command line as `--set table.key=value`. The same in a terminal:
`nyala settings learner.lr`, `nyala settings broker`, `nyala settings timeout`.

This page is written by `nyala settings --markdown > docs/settings.md`, from `configs/tables/`.
"""


class Setting(NamedTuple):
    """One setting as the lists show it."""

    name: str
    """Such as `learner.lr`, or `run.environments[].share` within a list."""
    unit: str
    values: str
    default: str
    meaning: str
    when: str


def settings() -> list[Setting]:
    """List all settings, in the order of the tables."""
    return [setting for table in Settings.model_fields for setting in _of(table)]


def as_lines(wanted: str | None) -> str:
    """Write the settings of that name, else of that table, else that have it in their names.

    Raises:
        SettingsError: No setting fits.
    """
    every = settings()
    matching = [
        setting
        for setting in every
        if wanted in {None, setting.name, setting.name.partition(".")[0]}
    ]
    matching = matching or [setting for setting in every if str(wanted) in setting.name]
    if not matching:
        guess = suggest(str(wanted).split("."))
        then = f"did you mean {guess}?" if guess else "`nyala settings` lists all"
        raise SettingsError(f"{wanted} is not a setting; {then}")
    return "\n".join(_paragraph(setting) for setting in matching)


def as_markdown() -> str:
    """Write the text of docs/settings.md."""
    parts = [HEAD]
    head = ("setting", "values", "unit", "default", "meaning", "when to change it")
    for name, field in Settings.model_fields.items():
        about = str(_tables_in(field)[0].__doc__).partition("\n")[0]
        rows = [(f"`{s.name}`", s.values, s.unit, f"`{s.default}`", *s[4:]) for s in _of(name)]
        parts += [f"## {name}\n", f"{about}\n", table(head, rows) + "\n"]
    return "\n".join(parts)


def _paragraph(setting: Setting) -> str:
    unit = f" {setting.unit}" if setting.unit else ""
    return (
        f"{setting.name}  (default {setting.default}{unit}; {setting.values})\n"
        f"    {' '.join(setting.meaning.split())}\n    {' '.join(setting.when.split())}\n"
    )


def _of(name: str) -> Iterator[Setting]:
    (model,) = _tables_in(Settings.model_fields[name])
    yield from _below(model, shown=name, path=name)


def _below(model: type[SettingsTable], *, shown: str, path: str) -> Iterator[Setting]:
    for key, field in model.model_fields.items():
        inner = _tables_in(field)
        if inner and not _is_list(field):
            yield from _below(inner[0], shown=f"{shown}.{key}", path=f"{path}.{key}")
            continue
        meaning, _, when = str(field.description).partition("\n\n")
        name = f"{shown}.{key}"
        yield Setting(name, _unit(name), allowed(f"{path}.{key}"), _default(field), meaning, when)
        if inner:
            is_one = type(None) in get_args(field.annotation)  # a table, or null
            item, entry = ("", "") if is_one else ("[]", ".0")
            yield from _below(inner[0], shown=name + item, path=f"{path}.{key}{entry}")


def _tables_in(field: FieldInfo) -> Sequence[type[SettingsTable]]:
    """Find the tables that a setting is, or is a list of."""
    kinds = (field.annotation, *get_args(field.annotation))
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, SettingsTable)]


def _is_list(field: FieldInfo) -> bool:
    return bool(get_args(field.annotation))


def _unit(name: str) -> str:
    for pattern, unit in UNITS:
        if match := re.search(pattern, name):
            return match.expand(unit)
    return ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "none: give it"
    value: Any = field.get_default(call_default_factory=True)
    return json.dumps(TypeAdapter(Any).dump_python(value, mode="json"), ensure_ascii=False)
