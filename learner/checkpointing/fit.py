"""Checks that a checkpoint fits the settings: what it was trained with, and what is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from configs.errors import CheckpointError
from learner.model.lora.adapters import Adapter
from learner.training.critic import Critic

from .learner_state import STATE, LearnerState
from .tensors.named import Part


def adapter_of(path: Path) -> Adapter | None:
    """Read the identity of a checkpoint's adapters; None = it has the weights themselves.

    Raises:
        CheckpointError: Its state cannot be read.
    """
    return LearnerState.decode((path / STATE).read_text(encoding="utf-8")).adapter


def check_adapter(path: Path, wanted: Adapter | None) -> None:
    """Refuse adapters of another rank, scale or base, and those of a run without any.

    Args:
        path: Of the checkpoint.
        wanted: Of the policy.

    Raises:
        CheckpointError: They are.
    """
    found = adapter_of(path)
    if found == wanted:
        return
    if found is not None and wanted is not None and found.base != wanted.base:
        raise CheckpointError(
            f"{path} must have adapters of the run's model, whose digest is {wanted.base[:12]}, "
            f"got those of {found.base[:12]}; restore run.model and run.dtype, or begin again "
            "with --fresh"
        )
    raise CheckpointError(
        f"{path} must be of {_settings(wanted)}, got one of {_settings(found)}; restore the "
        "settings, or begin again with --fresh"
    )


def check_critic(
    path: Path,
    part: Part,
    tensors: Mapping[str, Tensor],
    found: Mapping[str, object],
    critic: Critic | None,
) -> None:
    """Refuse a checkpoint of a run that had no critic, or one of the other kind.

    Args:
        path: Of the checkpoint.
        part: Of what is loaded.
        tensors: Of that part.
        found: Names in the checkpoint.
        critic: Of the run, if it has one.

    Raises:
        CheckpointError: It is.
    """
    if critic is not None and part.name == "critic" and not tensors.keys() <= found.keys():
        raise CheckpointError(
            f"{path} must hold a critic of critic.kind = {critic.settings.kind}, got "
            "none; restore the setting, or begin again with --fresh"
        )


def _settings(adapter: Adapter | None) -> str:
    if adapter is None:
        return "learner.lora_rank = 0"
    return f"learner.lora_rank = {adapter.rank} and lora_alpha = {adapter.alpha:g}"
