"""Sizes of `parallel` against the number of ranks, and against the heads of a model."""

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


def layout_of(parallel: ParallelSettings, ranks: int) -> Layout:
    """Divide ranks into groups.

    Raises:
        SettingsError: They cannot be divided so.
    """
    replicate, shard, sequence = parallel.replicate, parallel.shard, parallel.sequence
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


def check_heads(parallel: ParallelSettings, config: Mapping[str, Any]) -> None:
    """Refuse a model whose heads cannot be divided over the ranks that share a microbatch.

    Args:
        parallel: Has the number of these ranks.
        config: Of the model.

    Raises:
        SettingsError: They cannot.
    """
    sequence = parallel.sequence
    heads = config["num_attention_heads"]
    shared = config.get("num_key_value_heads") or heads
    if heads % sequence:
        raise SettingsError(
            f"parallel.sequence must divide the {heads} attention heads of the model, got "
            f"{sequence}; choose a divisor"
        )
    if shared % sequence and sequence % shared:
        raise SettingsError(
            f"parallel.sequence must divide the {shared} heads of keys and values of the model, or "
            f"be a multiple of them, got {sequence}; choose another divisor of its {heads} heads"
        )
