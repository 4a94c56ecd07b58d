"""Hashes of all that the processes of a run must agree on, compared when an actor joins.

The learner enters them into the store, every actor sends its own with HELLO. Computed from settings
and files alone: the learner can do it without importing an environment.
"""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import PackageNotFoundError, version

from configs.tables.run import RunSettings

from .errors import SettingsError
from .own_code import source_of

LOCAL_KEYS = {"directory", "environment", "model", "reward", "trusted_network"}
"""Keys of `run` that may differ between machines. The contents of the files that they name are
compared on their own: the model by the manifest of the weights, the others by their hashes."""

HASH_CHARACTERS = 16  # for telling files apart, not for keeping forgers out


def run_hashes(run: RunSettings) -> dict[str, str]:
    """Hash the shared settings, the environment with its file or package, and the reward's file.

    Raises:
        SettingsError: A file or module of the environment or the reward is not there.
    """
    return {
        "settings": settings_hash(run),
        "environment": _environment_hash(run),
        "reward": _rewards_hash(run),
    }


def settings_hash(run: RunSettings) -> str:
    """Hash what all roles of a run must agree on; the same on every machine, in every process."""
    # Without defaults: a setting that a later version adds leaves the runs of earlier ones alike.
    shared = run.model_dump(mode="json", exclude=LOCAL_KEYS, exclude_defaults=True)
    shared["environment"] = run.environment.rpartition("/")[2]
    text = json.dumps(shared, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def reward_hash(reward: str | None) -> str:
    """Hash of a reward function: its file and its name.

    Raises:
        SettingsError: There is no such file or module.
    """
    if reward is None:
        return "environment"
    return code_hash(reward, setting="run.reward")


def code_hash(name: str, *, setting: str) -> str:
    """Hash of a function or class of the user: its file and its name.

    Raises:
        SettingsError: There is no such file or module.
    """
    path = source_of(name, setting=setting)
    try:
        source = path.read_bytes()
    except OSError as error:
        raise SettingsError(
            f"{setting} must be a readable file, got {name!r}; {error.strerror}: {path}"
        ) from error
    attribute = name.rpartition(":")[2]
    return hashlib.sha256(source + attribute.encode()).hexdigest()[:HASH_CHARACTERS]


def _rewards_hash(run: RunSettings) -> str:
    functions = list(run.reward_functions.values())
    if len(functions) < 2:
        return reward_hash(functions[0] if functions else None)
    hashes = [reward_hash(function) for function in functions]
    return hashlib.sha256("".join(hashes).encode()).hexdigest()[:HASH_CHARACTERS]


def _environment_hash(run: RunSettings) -> str:
    keys = json.dumps(run.environment_settings, sort_keys=True, default=str)
    name = run.environment
    if ":" in name:
        code, package = code_hash(name, setting="run.environment"), name.partition(":")[0]
    else:
        code, package = name, name
    try:
        release = version(package.partition(".")[0].replace("_", "-"))
    except (PackageNotFoundError, ValueError):  # an absolute path begins with an empty name
        release = ""  # ours, or a file of the user
    text = f"{code}\n{release}\n{keys}"
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_CHARACTERS]
