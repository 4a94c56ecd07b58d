"""Rules of the learner, of `run.deterministic`, and of `parallel` against ranks and model.

`Settings` runs the rules; the learner's start and the checks of `nyala up` divide the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from configs.errors import SettingsError
from configs.tables.all_tables import AllTables
from configs.tables.learner import ParallelSettings


def learner_disagreements(settings: AllTables) -> list[str]:
    """List what is wrong about the learner, each with what to change."""
    checks = (
        _check_offload_of_muon,
        _check_offloaded_activations,
        _check_checkpointing_when_compiled,
        _check_broadcast_ports,
        _check_broadcast_when_advertised,
        _check_lora_alpha,
        _check_base_dtype,
        _check_nf4_when_compiled,
        _check_optimizer_of_lora,
        _check_sparse_weights_of_lora,
        _check_tensor_parallelism,
    )
    return [text for check in checks if (text := check(settings)) is not None]


def _check_offload_of_muon(settings: AllTables) -> str | None:
    learner = settings.learner
    if learner.optimizer != "muon" or "parameters" not in learner.offload:
        return None
    return (
        "learner.offload must not have parameters with learner.optimizer = muon, got both; muon's "
        "matrix products would run on the CPU: leave parameters out, or choose adamw"
    )


def _check_offloaded_activations(settings: AllTables) -> str | None:
    kept = settings.learner.activation_checkpointing
    if "activations" not in settings.learner.offload or kept in (None, "full"):
        return None
    return (
        "learner.activation_checkpointing must be full where learner.offload has activations, got "
        f"{kept}; tensors within a layer take longer to copy than to compute again: set it to null"
    )


def _check_checkpointing_when_compiled(settings: AllTables) -> str | None:
    if not settings.learner.compile or settings.learner.activation_checkpointing != "selective":
        return None
    return (
        "learner.activation_checkpointing must be none or full with learner.compile, got "
        "selective; its choice is among operations that compilation joins: set it to none or full"
    )


def _check_broadcast_when_advertised(settings: AllTables) -> str | None:
    learner = settings.learner
    if not learner.broadcast or learner.advertise is None:
        return None
    return (
        f"learner.broadcast must be null or false with learner.advertise, got true with "
        f"{learner.advertise}; groups connect to the publisher's own address, which actors do not "
        f"reach: set learner.broadcast to null"
    )


def _check_broadcast_ports(settings: AllTables) -> str | None:
    """Require two ports: a group that ends holds its port for as long as a broadcast may take."""
    ports, learner = settings.learner.broadcast_ports, settings.learner
    if ports is None:
        return None
    first, last = ports
    if first >= last:
        return (
            f"learner.broadcast_ports must be a first port and a higher last one, got {first} and "
            f"{last}; a group that forms needs another port than the one before it: name ten"
        )
    taken = int(learner.publisher_endpoint.rpartition(":")[2])
    if first <= taken <= last:
        return (
            f"learner.broadcast_ports must not have the port of learner.publisher_endpoint, got "
            f"{first} to {last} with {taken}; choose others"
        )
    if learner.broadcast is False:
        return (
            f"learner.broadcast_ports must be null with learner.broadcast: false, got {first} to "
            f"{last}; no group would use them: set it to null"
        )
    return None


def _check_lora_alpha(settings: AllTables) -> str | None:
    if settings.learner.lora_rank or settings.learner.lora_alpha is None:
        return None
    return (
        f"learner.lora_alpha must be null without learner.lora_rank, got "
        f"{settings.learner.lora_alpha:g}; set the rank of the adapters, 16 for example"
    )


def _check_base_dtype(settings: AllTables) -> str | None:
    base = settings.learner.base_dtype
    if settings.learner.lora_rank or base is None:
        return None
    return (
        f"learner.base_dtype must be null without learner.lora_rank, got {base}; weights that are "
        "trained are in float32: set the rank of adapters, 16 for example"
    )


def _check_nf4_when_compiled(settings: AllTables) -> str | None:
    if not settings.learner.compile or settings.learner.base_dtype != "nf4":
        return None
    return (
        "learner.base_dtype must be bfloat16 or null with learner.compile, got nf4; the compiler "
        "would make the table of nf4's levels again for each product: take bfloat16"
    )


def _check_optimizer_of_lora(settings: AllTables) -> str | None:
    if not settings.learner.lora_rank or settings.learner.optimizer == "adamw":
        return None
    return (
        "learner.optimizer must be adamw with learner.lora_rank, got "
        f"{settings.learner.optimizer}; the moments of adapters are small, and muon is not made "
        "for their factors: choose adamw"
    )


def _check_sparse_weights_of_lora(settings: AllTables) -> str | None:
    if not settings.learner.lora_rank or not settings.learner.sparse_weights:
        return None
    return (
        "learner.sparse_weights must be false with learner.lora_rank, got true; actors that pull "
        "fetch the adapters, which are shorter: set it to false"
    )


def _check_tensor_parallelism(settings: AllTables) -> str | None:
    learner, tensor = settings.learner, settings.parallel.tensor
    if tensor == 1:
        return None
    if learner.compile:
        return (
            f"learner.compile must be false with parallel.tensor > 1, got true with {tensor}; "
            "layers that exchange their outputs are not compiled: set it to false"
        )
    if learner.optimizer != "adamw":
        return (
            f"learner.optimizer must be adamw with parallel.tensor > 1, got {learner.optimizer} "
            f"with {tensor}; it needs whole rows of a matrix: choose adamw"
        )
    if learner.lora_rank:
        return (
            f"learner.lora_rank must be 0 with parallel.tensor > 1, got {learner.lora_rank} with "
            f"{tensor}; adapters are not divided: set parallel.tensor to 1, and use parallel.shard"
        )
    return None


# --------------------------------------------------------------------------------------------------
# Settings that `run.deterministic` needs; returns texts with what to change.
#
# Each rule is a setting, the value that it must have, and why another would let a bit of the run
# depend on which process was how fast.

Value = str | int | float | bool | None

RULES: tuple[tuple[str, Value, str], ...] = (
    ("run.max_policy_lag", 0, "else the pace of actors decides which version samples a token"),
    ("actors.engine", "torch", "the last bits of vLLM's log-probs depend on what it batches"),
    ("actors.max_concurrent_episodes", 1, "rows that are computed together change last bits"),
    ("actors.threads", 1, "sums of several threads are taken in other orders"),
    ("actors.kv_on_swap", "keep", "a cache that is computed anew differs in its last bits"),
    ("buffer.margin", 1.0, "more groups than a batch trains would be sampled one version too soon"),
    ("buffer.on_stale", "drop", "episodes of other versions would be trained"),
    ("algorithm.filter_zero_variance", False, "a batch has its own groups and no others"),
    ("replay.capacity", 0, "which groups are there to train again depends on when they came"),
    ("learner.device", "cpu", "GPUs may take sums in any order"),
    ("learner.threads", 1, "sums of several threads are taken in other orders"),
    ("learner.compile", False, "kernels are chosen by how fast they are"),
    ("learner.min_ranks", None, "other ranks take sums in other orders"),
    ("learner.checkpoint_every", 1, "a learner that is killed would take back what was sampled"),
)


def deterministic_disagreements(settings: AllTables) -> list[str]:
    """List settings under which two runs would not be equal bit for bit."""
    return list(_broken_rules(settings)) if settings.run.deterministic else []


def _broken_rules(settings: AllTables) -> Iterator[str]:
    for name, value, why in RULES:
        table, _, key = name.partition(".")
        got: Value = getattr(getattr(settings, table), key)
        if got != value:
            yield (
                f"{name} must be {_shown(value)} with run.deterministic, got {_shown(got)}; {why} "
                f"(docs/same-again.md)"
            )


def _shown(value: Value) -> str:
    """Write a value as YAML does."""
    return (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )


# --------------------------------------------------------------------------------------------------
# Sizes of `parallel` against the number of ranks, and against the sizes of a model.


class Layout(NamedTuple):
    """Sizes of groups of ranks: `parallel` with its default filled in."""

    replicate: int
    shard: int
    sequence: int
    tensor: int = 1


def layout_of(parallel: ParallelSettings, ranks: int) -> Layout:
    """Divide ranks into groups; `shard` is never null in the result.

    Args:
        parallel: Settings with the sizes.
        ranks: Ranks of the learner, on all its machines.

    Raises:
        SettingsError: The ranks cannot be divided so.
    """
    replicate, shard, sequence = parallel.replicate, parallel.shard, parallel.sequence
    tensor = parallel.tensor
    if ranks % tensor:
        raise SettingsError(
            f"parallel.tensor must divide learner.ranks of all machines = {ranks}, got {tensor}; "
            f"choose a divisor: with 1 each rank computes with whole matrices"
        )
    if tensor > 1:
        return _layout_with_tensor(parallel, ranks)
    if ranks % replicate:
        raise SettingsError(
            f"parallel.replicate must divide the number of ranks = {ranks}, got {replicate}; "
            f"choose a divisor: with 1 the weights are sharded over all ranks"
        )
    if shard is not None and replicate * shard != ranks:
        raise SettingsError(
            f"parallel.replicate x parallel.shard must be the number of ranks = {ranks}, got "
            f"{replicate} x {shard}; leave parallel.shard null for {ranks // replicate}"
        )
    if ranks % sequence:
        raise SettingsError(
            f"parallel.sequence must divide the number of ranks = {ranks}, got {sequence}; "
            f"choose a divisor: with 1 each rank has microbatches of its own"
        )
    return Layout(replicate, ranks // replicate, sequence)


def _layout_with_tensor(parallel: ParallelSettings, ranks: int) -> Layout:
    """Divide the ranks that have the same part of each matrix."""
    tensor = parallel.tensor
    alike = parallel.model_copy(update={"tensor": 1})
    try:
        return layout_of(alike, ranks // tensor)._replace(tensor=tensor)
    except SettingsError as error:
        raise SettingsError(
            f"with parallel.tensor = {tensor}, which leaves {ranks // tensor} of {ranks} ranks to "
            f"divide, {error}"
        ) from error


def check_heads(parallel: ParallelSettings, config: Mapping[str, Any]) -> None:
    """Refuse a model whose heads cannot be divided over the ranks.

    Args:
        parallel: Settings with the numbers of ranks.
        config: Configuration of the model.

    Raises:
        SettingsError: The heads cannot be divided.
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
