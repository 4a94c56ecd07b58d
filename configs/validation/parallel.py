"""Sizes of `parallel` against the number of ranks, and against the sizes of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from configs.errors import SettingsError
from configs.tables.parallel import ParallelSettings


class Layout(NamedTuple):
    """`parallel` with its default filled in."""

    replicate: int
    shard: int
    sequence: int
    tensor: int = 1


def layout_of(parallel: ParallelSettings, ranks: int) -> Layout:
    """Divide ranks into groups.

    Raises:
        SettingsError: They cannot be divided so.
    """
    replicate, shard, sequence = parallel.replicate, parallel.shard, parallel.sequence
    tensor = parallel.tensor
    if ranks % tensor:
        raise SettingsError(
            f"parallel.tensor must divide the learner's {ranks} rank(s), got {tensor}; 1 = each "
            f"rank computes with whole matrices"
        )
    if tensor > 1:
        return _with_tensor(parallel, ranks)
    if ranks % replicate:
        raise SettingsError(
            f"parallel.replicate must divide the learner's {ranks} rank(s), got {replicate}; "
            f"1 = weights are sharded over all of them"
        )
    if shard is not None and replicate * shard != ranks:
        raise SettingsError(
            f"parallel.replicate x parallel.shard must be the learner's {ranks} rank(s), got "
            f"{replicate} x {shard}; leave parallel.shard null for {ranks // replicate}"
        )
    if ranks % sequence:
        raise SettingsError(
            f"parallel.sequence must divide the learner's {ranks} rank(s), got {sequence}; "
            f"1 = each rank has microbatches of its own"
        )
    return Layout(replicate, ranks // replicate, sequence)


def _with_tensor(parallel: ParallelSettings, ranks: int) -> Layout:
    """Divide the ranks that have the same part of each matrix."""
    tensor = parallel.tensor
    alike = parallel.model_copy(update={"tensor": 1})
    try:
        return layout_of(alike, ranks // tensor)._replace(tensor=tensor)
    except SettingsError as error:
        raise SettingsError(
            f"parallel.tensor = {tensor} leaves {ranks // tensor} of {ranks} rank(s) for the rest "
            f"of the table: {error}"
        ) from error


def check_heads(parallel: ParallelSettings, config: Mapping[str, Any]) -> None:
    """Refuse a model whose heads cannot be divided over the ranks.

    Args:
        parallel: Has the numbers of these ranks.
        config: Of the model.

    Raises:
        SettingsError: They cannot.
    """
    tensor, sequence = parallel.tensor, parallel.sequence
    heads = config["num_attention_heads"]
    shared = config.get("num_key_value_heads") or heads
    for number, kind in (
        (heads, "attention heads"),
        (shared, "heads of keys and values"),
        (config["intermediate_size"] if tensor > 1 else 0, "columns of the inner layer"),
    ):
        if number % tensor:
            raise SettingsError(
                f"parallel.tensor must divide the {number} {kind} of the model, got {tensor}; "
                f"choose a divisor"
            )
    heads, shared = heads // tensor, shared // tensor
    left = f" that parallel.tensor = {tensor} leaves to a rank" if tensor > 1 else " of the model"
    if heads % sequence:
        raise SettingsError(
            f"parallel.sequence must divide the {heads} attention heads{left}, got "
            f"{sequence}; choose a divisor"
        )
    if shared % sequence and sequence % shared:
        raise SettingsError(
            f"parallel.sequence must divide the {shared} heads of keys and values{left}, or "
            f"be a multiple of them, got {sequence}; choose another divisor of its {heads} heads"
        )
