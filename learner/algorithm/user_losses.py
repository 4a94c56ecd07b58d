"""Surrogates, corrections and advantages of the user: found, checked, registered.

    algorithm.surrogate: path/to/file.py:function, module:function or package/name
        -> the function -> checks (`loss_checks.py`) -> a line of its registry

A package registers functions as entry points in the group of their kind, `nyala.losses.surrogate`,
`nyala.losses.correction` or `nyala.losses.advantage`. Only the learner calls this: for all other
roles such a setting is a name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint
from typing import Any

import torch

from configs.errors import SettingsError
from configs.hashes import code_hash
from configs.settings import AlgorithmSettings
from configs.tables.algorithm import OF_FUNCTIONS, is_user_function
from configs.user_code import find_packaged, load_packaged, load_user_code, packaged

from .advantages import ADVANTAGES
from .corrections import CORRECTIONS
from .loss_checks import check_advantage, check_correction, check_surrogate, reads_ratio_bound
from .surrogates import SURROGATES, WITH_RATIO_BOUND

REGISTRIES: Mapping[str, dict[str, Any]] = {
    "advantage": ADVANTAGES,
    "correction": CORRECTIONS,
    "surrogate": SURROGATES,
}
"""Key of `algorithm` -> the functions that it chooses from."""

CPU = torch.device("cpu")


def register_user_losses(
    settings: AlgorithmSettings, *, max_policy_lag: int, device: torch.device = CPU
) -> list[str]:
    """Load, check and register the functions of the user that the settings name.

    Args:
        settings: Names, bounds and parameters.
        max_policy_lag: `run.max_policy_lag`.
        device: Device on which they will be called.

    Returns:
        What was registered, with the hash of its file: `algorithm.surrogate: a.py:f, 0f3a...`.

    Raises:
        SettingsError: A function cannot be loaded, or is wrong.
    """
    functions = load_user_losses(settings, max_policy_lag=max_policy_lag, device=device)
    for kind, function in functions.items():
        name = getattr(settings, kind)
        REGISTRIES[kind][name] = function
        if kind == "surrogate" and reads_ratio_bound(function, settings, device):
            WITH_RATIO_BOUND.add(name)
    return [
        f"algorithm.{kind}: {name}, {code_hash(_code_of(kind, name), setting=f'algorithm.{kind}')}"
        for kind in functions
        for name in [getattr(settings, kind)]
    ]


def _code_of(kind: str, name: str) -> str:
    """Return a function as `path/to/file.py:function` or `module:function`, also of a package."""
    return name if ":" in name else find_packaged(name, f"algorithm.{kind}", group_of(kind)).value


def load_user_losses(
    settings: AlgorithmSettings, *, max_policy_lag: int, device: torch.device = CPU
) -> dict[str, Callable[..., Any]]:
    """Load and check the functions of the user that the settings name, by kind.

    Raises:
        SettingsError: One cannot be loaded, or is wrong.
    """
    functions = {}
    for kind in OF_FUNCTIONS:
        if is_user_function(name := getattr(settings, kind)):
            functions[kind] = load_loss(kind, name)
            check_loss(kind, functions[kind], settings, max_policy_lag, device)
    return functions


def load_loss(kind: str, name: str) -> Callable[..., Any]:
    """Import a function of the user or of a package.

    Args:
        kind: Key of `algorithm`, such as `surrogate`.
        name: Its name as in the settings.

    Raises:
        SettingsError: It cannot be imported.
    """
    setting = f"algorithm.{kind}"
    if ":" in name:
        function: Callable[..., Any] = load_user_code(name, setting=setting, kind="function")
        return function
    loaded: Callable[..., Any] = load_packaged(name, setting=setting, group=group_of(kind))
    if not callable(loaded):
        raise SettingsError(
            f"{setting} must be a function, got {name!r}, which is {loaded!r}; correct the entry "
            f"point of the package"
        )
    return loaded


def check_loss(
    kind: str,
    function: Callable[..., Any],
    settings: AlgorithmSettings,
    max_policy_lag: int,
    device: torch.device = CPU,
) -> None:
    """Check a function that the settings name, on made-up batches.

    It may leave pi/mu out where no token has a lag.

    Raises:
        SettingsError: It is wrong; the text says what about it, and what to change.
    """
    name, is_on_policy = getattr(settings, kind), max_policy_lag == 0
    if kind == "advantage":
        check_advantage(function, name, settings)
    elif kind == "correction":
        check_correction(function, name, settings, may_ignore_ratio=is_on_policy, device=device)
    else:
        # About prox the ratio is that of the batch's own optimizer steps: 1 in the first.
        is_one = is_on_policy or settings.proximal == "recomputed"
        is_single = settings.num_epochs * settings.num_minibatches == 1
        may_ignore_ratio = is_one and is_single
        check_surrogate(function, name, settings, may_ignore_ratio=may_ignore_ratio, device=device)


def packaged_losses() -> dict[str, dict[str, EntryPoint]]:
    """Find what installed packages register, by kind; nothing is imported."""
    return {kind: packaged(group_of(kind)) for kind in OF_FUNCTIONS}


def group_of(kind: str) -> str:
    """Return the group of entry points of a kind."""
    return f"nyala.losses.{kind}"
