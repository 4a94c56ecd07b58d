"""Rules between settings of the learner; each check returns an error text, or None."""

from __future__ import annotations

from configs.tables.all_tables import AllTables


def learner_disagreements(settings: AllTables) -> list[str]:
    """List what is wrong about the learner, each with what to change."""
    checks = (
        _orthogonalises_on_the_host,
        _offloads_too_much,
        _keeps_what_is_compiled,
        _forms_groups_nowhere,
        _forms_groups_out_of_reach,
        _scales_no_adapter,
        _adapts_with_another_optimizer,
        _compares_what_adapters_describe,
        _divides_what_must_be_whole,
    )
    return [text for check in checks if (text := check(settings)) is not None]


def _orthogonalises_on_the_host(settings: AllTables) -> str | None:
    learner = settings.learner
    if learner.optimizer != "muon" or "parameters" not in learner.offload:
        return None
    return (
        "learner.offload must not have parameters with learner.optimizer = muon, got both; its "
        "matrix products would run on the CPU: choose adamw"
    )


def _offloads_too_much(settings: AllTables) -> str | None:
    kept = settings.learner.activation_checkpointing
    if "activations" not in settings.learner.offload or kept in (None, "full"):
        return None
    return (
        "learner.activation_checkpointing must be full where learner.offload has activations, got "
        f"{kept}; more than the inputs of layers would take longer to copy than to compute again"
    )


def _keeps_what_is_compiled(settings: AllTables) -> str | None:
    if not settings.learner.compile or settings.learner.activation_checkpointing != "selective":
        return None
    return (
        "learner.activation_checkpointing must be none or full with learner.compile, got "
        "selective; it chooses among operations that are compiled into one"
    )


def _forms_groups_out_of_reach(settings: AllTables) -> str | None:
    learner = settings.learner
    if not learner.broadcast or learner.advertise is None:
        return None
    return (
        f"learner.broadcast must be null or false with learner.advertise, got true with "
        f"{learner.advertise}; groups connect to the publisher's own address, where actors do not "
        f"reach it"
    )


def _forms_groups_nowhere(settings: AllTables) -> str | None:
    """A group that ends holds its port for as long as a broadcast may take: two are the least."""
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
            f"{last}; no group forms"
        )
    return None


def _scales_no_adapter(settings: AllTables) -> str | None:
    if settings.learner.lora_rank or settings.learner.lora_alpha is None:
        return None
    return (
        f"learner.lora_alpha must be null without learner.lora_rank, got "
        f"{settings.learner.lora_alpha:g}; set the rank of the adapters, 16 for example"
    )


def _adapts_with_another_optimizer(settings: AllTables) -> str | None:
    if not settings.learner.lora_rank or settings.learner.optimizer == "adamw":
        return None
    return (
        "learner.optimizer must be adamw with learner.lora_rank, got "
        f"{settings.learner.optimizer}; the moments of adapters are small, and their matrices are "
        "factors, which muon is not for"
    )


def _compares_what_adapters_describe(settings: AllTables) -> str | None:
    if not settings.learner.lora_rank or not settings.learner.sparse_weights:
        return None
    return (
        "learner.sparse_weights must be false with learner.lora_rank, got true; actors that pull "
        "take adapters, which are shorter"
    )


def _divides_what_must_be_whole(settings: AllTables) -> str | None:
    learner, tensor = settings.learner, settings.parallel.tensor
    if tensor == 1:
        return None
    if learner.compile:
        return (
            f"learner.compile must be false with parallel.tensor > 1, got true with {tensor}; "
            "layers that exchange their outputs are not compiled"
        )
    if learner.optimizer != "adamw":
        return (
            f"learner.optimizer must be adamw with parallel.tensor > 1, got {learner.optimizer} "
            f"with {tensor}; it needs whole rows of a matrix"
        )
    if learner.lora_rank:
        return (
            f"learner.lora_rank must be 0 with parallel.tensor > 1, got {learner.lora_rank} with "
            f"{tensor}; a model of which adapters alone are trained fits with parallel.shard"
        )
    return None
