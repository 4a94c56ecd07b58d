"""Files of the user in the settings of a run: made absolute when it is created, then kept.

The run's config.yaml then means the same from any folder. A path in the settings file is relative
to the folder of that file (`configs/loader.py`), any other path to the folder in which the run was
begun.
"""

from __future__ import annotations

from pathlib import Path, PurePath
from typing import Any

from configs.hashes import code_of_rows, data_files
from configs.settings import RunSettings, Settings
from configs.tables.algorithm import OF_FUNCTIONS
from configs.tables.environments import OneEnvironment
from configs.user_python import command_words

USER_FILE_KEYS = (
    "model",
    "environment",
    "environment_settings",
    "environment_python",
    "reward",
    "sampler",
    "environments",
)
"""Keys of `run` that name files."""


def resolve(settings: Settings) -> Settings:
    """Return settings in which all paths of the user are absolute."""
    run, algorithm = settings.run, settings.algorithm
    changes: dict[str, object] = {"directory": run.directory.expanduser().resolve()}
    if run.model != "init":
        changes["model"] = _model(run.model)
    changes |= _user_files(run) | {"sampler": _absolute(run.sampler)}
    changes["environments"] = tuple(
        environment.model_copy(
            update=_user_files(alone) | {"reward": _absolutes(environment.reward)}
        )
        for environment, alone in zip(run.environments, run.by_environment.values(), strict=False)
    )
    resolved = _with_teacher(settings.model_copy(update={"run": run.model_copy(update=changes)}))
    for key in OF_FUNCTIONS:
        named = _absolute(getattr(algorithm, key))
        resolved = with_value(resolved, "algorithm", key, named)
    if settings.sft.data is not None:
        data = Path(settings.sft.data).expanduser()
        name = str(data.resolve()) if data.exists() else settings.sft.data
        resolved = with_value(resolved, "sft", "data", name)
    if settings.broker.keys is not None:
        keys = settings.broker.keys.expanduser().resolve()
        resolved = with_value(resolved, "broker", "keys", keys)
    return _with_command(resolved)


def resolve_as_begun(settings: Settings, begun: Settings) -> Settings:
    """Make paths absolute; a path that does not exist from here is taken from an unfinished run.

    Args:
        settings: Settings as typed.
        begun: Settings of the unfinished run, whose paths are absolute.
    """
    kept = {
        key: _kept(getattr(settings.run, key), getattr(begun.run, key)) for key in USER_FILE_KEYS
    }
    functions = {
        key: _kept(getattr(settings.algorithm, key), getattr(begun.algorithm, key))
        for key in OF_FUNCTIONS
    }
    changes = {
        "run": settings.run.model_copy(update=kept),
        "algorithm": settings.algorithm.model_copy(update=functions),
    }
    return resolve(settings.model_copy(update=changes))


def _with_teacher(settings: Settings) -> Settings:
    """Return settings whose teachers have absolute folders; a name on a hub stays as it is."""
    teacher, prompt = settings.algorithm.teacher, settings.algorithm.teacher_prompt
    if isinstance(teacher, dict):
        settings = with_value(
            settings, "algorithm", "teacher", {name: _model(path) for name, path in teacher.items()}
        )
    elif teacher is not None:
        settings = with_value(settings, "algorithm", "teacher", _model(teacher))
    if prompt is not None:
        settings = with_value(settings, "algorithm", "teacher_prompt", _absolute(prompt))
    return settings


def _model(name: str) -> str:
    """Make the folder of a model absolute; any other name stays as it is."""
    path = Path(name).expanduser()
    return str(path.resolve()) if path.exists() else name


def _with_command(settings: Settings) -> Settings:
    """Return settings whose command of agents has absolute files: it runs in another folder."""
    words = command_words(settings.agents)
    return with_value(settings, "agents", "command", words) if words else settings


def with_value(settings: Settings, table: str, key: str, value: object) -> Settings:
    """Return settings with one value changed."""
    changed = getattr(settings, table).model_copy(update={key: value})
    return settings.model_copy(update={table: changed})


def _kept(typed: Any, begun: Any) -> Any:
    """Return a value in which each path that does not exist is the begun one with the same end."""
    match typed, begun:
        case str(), str():
            return begun if _is_elsewhere(typed, begun) else typed
        case dict(), dict():
            return {key: _kept(value, begun.get(key)) for key, value in typed.items()}
        case (list(), list()) | (tuple(), tuple()) if len(typed) == len(begun):
            return type(typed)(map(_kept, typed, begun))
        case OneEnvironment(), OneEnvironment():
            changes = {key: _kept(value, getattr(begun, key)) for key, value in typed}
            return typed.model_copy(update=changes)
        case _:
            return typed


def _is_elsewhere(typed: str, begun: str) -> bool:
    """Return whether a relative path does not exist from here and may be the one of `begun`."""
    place, other = PurePath(_place(typed)), PurePath(_place(begun))
    parts = [part for part in place.parts if part != ".."]
    return (
        bool(parts)
        and other.is_absolute()
        and not place.is_absolute()
        and list(other.parts[-len(parts) :]) == parts
        and not Path(place).expanduser().exists()
    )


def _place(name: str) -> str:
    """Return the file of `path.py:name`, or the path itself."""
    place = name.rpartition(":")[0]
    return place if place.endswith(".py") else name


def _user_files(run: RunSettings) -> dict[str, object]:
    """Make the files of a run that has one environment absolute."""
    python = run.environment_python  # a link, which is kept: its target is another Python
    return {
        "environment": _absolute(run.environment),
        "environment_settings": run.environment_settings | _absolute_data(run),
        "environment_python": python and str(Path(python).expanduser().absolute()),
        "reward": _absolutes(run.reward),
    }


def _absolutes(code: str | list[str] | None) -> str | list[str] | None:
    """Make the files of several functions absolute."""
    if isinstance(code, list):
        return [_absolute(name) for name in code]
    return None if code is None else _absolute(code)


def _absolute(code: str) -> str:
    """Make the file of a function or class absolute; a module stays as it is."""
    place, colon, name = code.rpartition(":")
    if not place.endswith(".py"):
        return code
    return f"{Path(place).expanduser().resolve()}{colon}{name}"


def _absolute_data(run: RunSettings) -> dict[str, str]:
    """Make the files of a dataset absolute; a name on a hub stays as it is."""
    places = {key: Path(name).expanduser() for key, name in data_files(run).items()}
    absolute = {key: str(place.resolve()) for key, place in places.items() if place.exists()}
    return absolute | {key: _absolute(name) for key, name in code_of_rows(run).items()}
