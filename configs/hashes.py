"""Hashes of all that the processes of a run must agree on, compared when an actor joins.

The learner enters them into the store, every actor sends its own with HELLO. Computed from settings
and files alone: the learner can do it without importing an environment.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from configs.tables.environments import OF_ROWS
from configs.tables.run import UNIFORM, RunSettings

from .errors import SettingsError
from .machine import arithmetic_hash
from .user_code import missing, source_of

LOCAL_KEYS = {
    "directory",
    "environment",
    "environment_python",
    "eval_metric",
    "model",
    "reward",
    "sampler",
    "samples",
    "tracing",
    "trusted_network",
}
"""Keys of `run` that may differ between machines. The contents of the files that they name are
compared on their own: the model by the manifest of the weights, the others by their hashes, as are
the files of a dataset."""

JUDGING = {"math-verify": "math-verify", "json_schema": "jsonschema"}
"""Scorers of the environment `dataset`, with the package whose release says what is right."""

HASH_CHARACTERS = 16
"""Length of all hashes except that of the settings, which is whole: enough to tell files apart, not
to keep forgers out."""


def run_hashes(run: RunSettings) -> dict[str, str]:
    """Hash the shared settings, the environment with its file or package, and the reward's file.

    For a run with `run.deterministic`, hash the processor and the libraries of arithmetic, too.

    Raises:
        SettingsError: A file or module of the environment or the reward is not there.
    """
    alone = run.by_environment.values()
    hashes = {
        "settings": settings_hash(run),
        "environment": _joined([_environment_hash(environment) for environment in alone]),
        "reward": _joined([_rewards_hash(environment) for environment in alone]),
    }
    return hashes | ({"processor_and_torch": arithmetic_hash()} if run.deterministic else {})


def settings_hash(run: RunSettings) -> str:
    """Hash the settings that all roles of a run must share, all 64 characters.

    It is the same on every machine. `LOCAL_KEYS` are left out; files of a dataset count by name.
    """
    # Without defaults: a setting that a later version adds leaves the runs of earlier ones alike.
    shared = run.model_dump(mode="json", exclude=LOCAL_KEYS, exclude_defaults=True)
    if run.environments:
        shared["environments"] = [
            environment.model_dump(mode="json", exclude=LOCAL_KEYS, exclude_defaults=True)
            | _environment_and_data(alone)
            for environment, alone in zip(
                run.environments, run.by_environment.values(), strict=True
            )
        ]
    else:
        shared |= _environment_and_data(run)
    if run.sampler != UNIFORM:
        shared["sampler"] = run.sampler.rpartition("/")[2]
    text = json.dumps(shared, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _environment_and_data(run: RunSettings) -> dict[str, object]:
    """Return the environment of a run and its data, named by their files."""
    named: dict[str, object] = {"environment": run.environment.rpartition("/")[2]}
    if data := data_files(run) | code_of_rows(run):
        names = {key: Path(name).name for key, name in data.items()}
        named["environment_settings"] = run.environment_settings | names
    return named


def data_files(run: RunSettings) -> dict[str, str]:
    """Return the files of an environment of rows, by the key that names each."""
    if run.environment not in OF_ROWS:
        return {}
    names = {key: run.environment_settings.get(key) for key in ("path", "held_out")}
    return {key: str(name) for key, name in names.items() if name is not None}


def code_of_rows(run: RunSettings) -> dict[str, str]:
    """Return the code that an environment of rows names, by its key.

    It is the class that plays the rows of a dataset, and the function that shows how an agent's
    conversation goes.
    """
    key = {"dataset": "factory", "agent": "demonstration"}.get(run.environment, "")
    name = run.environment_settings.get(key)
    return {key: name} if isinstance(name, str) else {}


def is_hosted(run: RunSettings) -> bool:
    """Whether the environment runs in a Python of its own."""
    return bool(run.environment_requirements or run.environment_python)


def data_hash(name: str) -> str:
    """Hash a file or all files in a folder; return any other name as it is.

    Such a name is that of a dataset on a hub, or a missing file, which the environment refuses.

    Raises:
        SettingsError: A file cannot be read.
    """
    place = Path(name).expanduser()
    if not place.exists():
        return name  # on a hub; or missing, which the environment says better
    digest = hashlib.sha256()
    try:
        for path in sorted(place.rglob("*")) if place.is_dir() else [place]:
            if path.is_file():
                with path.open("rb") as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
    except OSError as error:
        raise SettingsError(
            f"run.environment_settings must name readable files, got {name!r}: {error.strerror}; "
            "name files that this user can read"
        ) from error
    return digest.hexdigest()[:HASH_CHARACTERS]


def reward_hash(reward: str | None) -> str:
    """Hash a reward function by its file and name; for None, the environment's own score, a word.

    Raises:
        SettingsError: There is no such file or module.
    """
    if reward is None:
        return "environment"
    return code_hash(reward, setting="run.reward")


def code_hash(name: str, *, setting: str) -> str:
    """Hash a function or class of the user by its one file and its name, not what it imports.

    Raises:
        SettingsError: There is no such file or module.
    """
    path = source_of(name, setting=setting)
    try:
        source = path.read_bytes()
    except FileNotFoundError:
        raise SettingsError(
            f"{setting} must be a readable file, got {name!r}; {missing(path)}: correct the path"
        ) from None
    except OSError as error:
        raise SettingsError(
            f"{setting} must be a readable file, got {name!r}; {error.strerror}: {path}; let this "
            "user read it, or name another"
        ) from error
    attribute = name.rpartition(":")[2]
    return hashlib.sha256(source + attribute.encode()).hexdigest()[:HASH_CHARACTERS]


def _rewards_hash(run: RunSettings) -> str:
    functions: list[str | None] = [*run.reward_functions.values()] or [None]
    return _joined([reward_hash(function) for function in functions])


def _joined(hashes: Sequence[str]) -> str:
    """Combine several hashes into one; a single hash stays as it is."""
    if len(hashes) == 1:
        return hashes[0]
    return hashlib.sha256("".join(hashes).encode()).hexdigest()[:HASH_CHARACTERS]


def environment_code(run: RunSettings) -> str:
    """Hash the file and the name of the environment's class.

    Return the bare name of a built-in environment, and of a module that only the environment's own
    Python may have.

    Raises:
        SettingsError: There is no such file or module.
    """
    name = run.environment
    if ":" not in name or (is_hosted(run) and not name.rpartition(":")[0].endswith(".py")):
        return name
    return code_hash(name, setting="run.environment")


def _environment_hash(run: RunSettings) -> str:
    contents = {key: data_hash(name) for key, name in data_files(run).items()}
    contents |= {
        key: code_hash(name, setting=f"run.environment_settings.{key}")
        for key, name in code_of_rows(run).items()
        if not is_hosted(run) or name.rpartition(":")[0].endswith(".py")
    }
    keys = json.dumps(run.environment_settings | contents, sort_keys=True, default=str)
    name = run.environment
    code = environment_code(run)
    is_elsewhere = is_hosted(run) and code == name
    package = "" if is_elsewhere else name.partition(":")[0]
    if name == "dataset":
        package = JUDGING.get(str(run.environment_settings.get("scorer")), "")
    try:
        release = version(package.partition(".")[0].replace("_", "-"))
    except (PackageNotFoundError, ValueError):  # an absolute path begins with an empty name
        release = ""  # ours, or a file of the user
    text = f"{code}\n{release}\n{keys}"
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_CHARACTERS]
