"""Settings from a YAML file and `table.key=value` overrides, and back to a file; their JSON schema.

Owns reading, overriding and saving. Errors are worded in `error_text.py`, settings are
described in `tables/`.

Example:
    settings = load("configs/demo.yaml", ["learner.lr=1e-4", "actors.count=3"])
    save(settings, settings.run.folder / "config.yaml")
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from . import durable
from .error_text import describe_all
from .errors import SettingsError, quoted
from .settings import Settings
from .tables.algorithm import OF_FUNCTIONS
from .tables.environments import OF_ROWS
from .user_code import beside, looked_in

Tree = dict[str, Any]
"""Settings before they are checked: tables of keys."""

MAX_FILE_BYTES = 2**20  # the longest preset has 3 kB: anything like this size is a wrong file


FILES = ("model", "environment", "environment_python", "reward", "sampler")
"""Keys of `run`, and of each of `run.environments`, that name files of the user."""
FILES_ELSEWHERE = {
    "algorithm": ("reference_model", "teacher", "teacher_prompt", *OF_FUNCTIONS),
    "broker": ("keys",),
    "sft": ("data",),
}
"""Keys of other tables that name files of the user."""
IN_FILES = (
    *("environment", "reward", "sampler", "factory", "demonstration", "teacher_prompt"),
    *OF_FUNCTIONS,
)
"""Keys among them that name something in a Python file, in a module, or of Nyala's own."""
DATA_FILES = ("path", "held_out", "factory", "demonstration")
"""Keys in `environment_settings` of the environments of rows that name files of the user."""


def load(path: Path | str, overrides: Sequence[str] = (), *, finds_files: bool = True) -> Settings:
    """Read settings from a YAML file.

    A relative name of a file in it is looked for beside it first, and then, as those in `overrides`
    alone, in the folder in which the command is typed.

    Args:
        path: The file.
        overrides: `table.key=value`, the value written as in YAML; later ones win.
        finds_files: Make names of files that lie beside it absolute, and let this process look
            there for user code from now on. False for settings of other machines.

    Raises:
        SettingsError: The file cannot be read, or anything in it or in `overrides` is wrong; the
            text lists all problems.
    """
    path = Path(path)
    tree = _read(path)
    if finds_files:
        folder = Path(os.path.abspath(path)).parent  # noqa: PTH100 - a link's own
        _find_files(tree, folder, environment=_overridden("run.environment", overrides))
    return check_tree(tree, overrides, source=str(path))


def check_tree(tree: Tree, overrides: Sequence[str], *, source: str) -> Settings:
    """Make settings of tables of keys, which the overrides change.

    Args:
        tree: Settings as in a file.
        overrides: As of `load`.
        source: File that they are of, or another name for them in errors.

    Raises:
        SettingsError: Anything is wrong; the text lists all problems.
    """
    problems = [problem for text in overrides if (problem := _override(tree, text)) is not None]
    settings: Settings | None = None
    try:
        # JSON mode is strict about types (no "3" for 3, no true for 1) yet takes a text as a path.
        settings = Settings.model_validate_json(_as_json(tree, source), strict=True)
    except ValidationError as error:
        problems += describe_all(error)
    if settings is None or problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        lines = "".join(f"\n  {problem}" for problem in problems)
        raise SettingsError(f"{source} has {count}; nothing was started:{lines}")
    return settings


def _find_files(tree: Tree, folder: Path, *, environment: str | None) -> None:
    """Make the names of files that lie in a folder absolute, in place.

    Args:
        tree: Settings as they are written in the file.
        folder: Folder of the settings file.
        environment: `run.environment` where an override names it.
    """
    if folder in looked_in:
        looked_in.remove(folder)
    looked_in.insert(0, folder)
    for name, keys in FILES_ELSEWHERE.items():
        _make_absolute(tree.get(name), keys, folder)
    run = tree.get("run")
    if not isinstance(run, dict):
        return
    environments = run.get("environments")
    for table in (run, *(environments if isinstance(environments, list) else ())):
        if not isinstance(table, dict):
            continue
        _make_absolute(table, FILES, folder)
        named = environment if environment and table is run else table.get("environment")
        if named in OF_ROWS:
            _make_absolute(table.get("environment_settings"), DATA_FILES, folder)


def _make_absolute(table: Any, keys: Sequence[str], folder: Path) -> None:
    for key in keys if isinstance(table, dict) else ():
        match table.get(key):
            case str() as name if _may_be_a_file(key, name):
                table[key] = beside(name, folder)
            case list() as names:
                table[key] = [
                    beside(name, folder)
                    if isinstance(name, str) and _may_be_a_file(key, name)
                    else name
                    for name in names
                ]
            case dict() as by_name:
                table[key] = {
                    name: beside(value, folder) if isinstance(value, str) else value
                    for name, value in by_name.items()
                }
            case _:  # none, or what is refused later
                pass


def _overridden(path: str, overrides: Sequence[str]) -> str | None:
    """Return the value that the last override gives a setting; None = no override does."""
    pairs = (text.partition("=") for text in overrides)
    return {key.strip(): value.strip() for key, _, value in pairs}.get(path)


def _may_be_a_file(key: str, name: str) -> bool:
    """Whether a name may be a file; Nyala's own names never are, even where such a file exists."""
    return ".py:" in name if key in IN_FILES else name != "init"


def save(settings: Settings, path: Path) -> None:
    """Write, or replace, a file of all settings, defaults included; `load` reads the same again."""
    text = "# Written by Nyala: all settings of this run, defaults included.\n" + yaml.safe_dump(
        settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=100
    )
    # Rename: a process that starts just now reads the old file or the new one, never half of one.
    durable.replace_file(path, text)


def json_schema() -> str:
    """Write the JSON schema with which editors complete and check the presets."""
    schema = Settings.model_json_schema()
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def _read(path: Path) -> Tree:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise SettingsError(
                f"{path} must be a settings file, got more than 1 MiB; name the config.yaml of a "
                "run, or a preset"
            )
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SettingsError(
            f"{path} must be a YAML file, got a path that does not exist; "
            f"presets are in {presets_folder()}"
        ) from None
    except IsADirectoryError:
        raise SettingsError(
            f"{path} must be a YAML file, got a directory; name a file in it"
        ) from None
    except UnicodeDecodeError:
        raise SettingsError(
            f"{path} must be a YAML file, got bytes that are not UTF-8; save it as UTF-8"
        ) from None
    except OSError as error:
        raise SettingsError(
            f"{path} must be a readable YAML file, got: {error.strerror}; let this user read it"
        ) from None
    try:
        tree = yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader, see below
    except yaml.YAMLError as error:
        raise SettingsError(
            f"{path} must be a YAML file, got: {_one_line(error)}; mend that line"
        ) from None
    except _UNREADABLE as error:
        text = f"{type(error).__name__}: {error}"
        raise SettingsError(
            f"{path} must be a YAML file, got a value with {text:.200}; mend that value"
        ) from None
    if tree is None:
        raise SettingsError(
            f"{path} must have a `run:` table with a `model`, got an empty file; write them, or "
            "copy a preset"
        )
    if not isinstance(tree, dict):
        raise SettingsError(
            f"{path} must have tables such as `run:`, got {type(tree).__name__} "
            f"{quoted(str(tree), 60)}; write the settings under them"
        )
    return {str(table): {} if keys is None else keys for table, keys in tree.items()}


def _as_json(tree: Tree, source: str) -> str:
    """Write the tree as JSON, which has no dates as keys and no aliases of enclosing tables."""
    try:
        return json.dumps(tree, default=str)
    except (TypeError, ValueError, RecursionError) as error:
        raise SettingsError(
            f"{source} must have plain tables and values, got: {error}; write keys as texts, and "
            "no anchor inside itself"
        ) from None


def _override(tree: Tree, text: str) -> str | None:
    """Put one `table.key=value` into the tree; return the problem, if any."""
    path, equals, value = text.partition("=")
    names = path.strip().split(".")
    if not equals or not all(names):
        return f"an override must be table.key=value, got {text!r}; write --set learner.lr=1e-4"
    try:
        parsed = yaml.load(value, Loader=_Loader)  # noqa: S506 - a SafeLoader, see below
    except yaml.YAMLError as error:
        return (
            f"the value of {path} must be written as in YAML, got {value!r} ({_one_line(error)}); "
            "put a text with such characters in quotes"
        )
    table = tree
    for name in names[:-1]:
        below = table.setdefault(name, {})
        if not isinstance(below, dict):
            return (
                f"$.{path} must be a key of a table, got {name} = {below!r}, which is none; leave "
                f"out what follows {name}"
            )
        table = below
    table[names[-1]] = parsed
    return None


def presets_folder() -> Path:
    """Return the folder of this package, which has the presets."""
    return Path(__file__).parent


def _one_line(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"{error.problem} (line {error.problem_mark.line + 1})"
    return " ".join(str(error).split())


_UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
"""What PyYAML lets through from its constructors: the 45th of a month, a tag that does not fit."""


class _Loader(yaml.SafeLoader):
    """YAML as people read it: `1e-4` is a number, and a key that is written twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    problem = f"the key `{key.value}` is written twice"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                seen.add(key.value)
        mapping: Mapping[Hashable, Any] = super().construct_mapping(node, deep=deep)
        return dict(mapping)


# PyYAML follows YAML 1.1, where a float needs a dot and 5e-4 is a text.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)
