"""Hashes of all that the processes of a run must agree on, compared when an actor joins.

The learner enters them into the store, every actor sends its own with HELLO. Computed from settings
and files alone: the learner can do it without importing an environment.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from configs.tables.run import RunSettings

from .errors import SettingsError

LOCAL_KEYS = {"directory", "model", "reward", "trusted_network"}
"""Keys of `run` that may differ between machines. The contents of the files that they name are
compared on their own: the model by the manifest of the weights, the reward by its hash."""

HASH_CHARACTERS = 16  # for telling files apart, not for keeping forgers out


def run_hashes(run: RunSettings) -> dict[str, str]:
    """Hash the shared settings, the environment with its package, and the reward function's file.

    Raises:
        SettingsError: The reward's file or module is not there.
    """
    return {
        "settings": settings_hash(run),
        "environment": _environment_hash(run),
        "reward": _rewards_hash(run),
    }


def settings_hash(run: RunSettings) -> str:
    """Hash what all roles of a run must agree on; the same on every machine, in every process."""
    shared = run.model_dump(mode="json", exclude=LOCAL_KEYS)
    text = json.dumps(shared, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def reward_hash(reward: str | None) -> str:
    """Hash of a reward function: its file and its name.

    Raises:
        SettingsError: There is no such file or module.
    """
    if reward is None:
        return "environment"
    place, _, name = reward.rpartition(":")
    path = Path(place) if place.endswith(".py") else _module_file(place, reward)
    try:
        source = path.read_bytes()
    except OSError as error:
        raise SettingsError(
            f"run.reward must be a readable file, got {reward!r}; {error.strerror}: {path}"
        ) from error
    return hashlib.sha256(source + name.encode()).hexdigest()[:HASH_CHARACTERS]


def _rewards_hash(run: RunSettings) -> str:
    functions = list(run.reward_functions.values())
    if len(functions) < 2:
        return reward_hash(functions[0] if functions else None)
    hashes = [reward_hash(function) for function in functions]
    return hashlib.sha256("".join(hashes).encode()).hexdigest()[:HASH_CHARACTERS]


def _environment_hash(run: RunSettings) -> str:
    keys = json.dumps(run.environment_settings, sort_keys=True, default=str)
    try:
        package = version(run.environment.partition(":")[0].partition(".")[0].replace("_", "-"))
    except PackageNotFoundError:
        package = ""  # ours, or a file beside the run
    text = f"{run.environment}\n{package}\n{keys}"
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_CHARACTERS]


def _module_file(place: str, reward: str) -> Path:
    try:
        spec = importlib.util.find_spec(place)
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None:
        raise SettingsError(
            f"run.reward must be in an importable module, got {reward!r}; "
            f"there is no module {place!r} on this machine"
        )
    return Path(spec.origin)
