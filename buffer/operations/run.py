"""A run as a whole: entry, counts, memory, actors and brokers, and recovery after lost writes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from configs.errors import SettingsError

from .operation import (
    Operation,
    Reply,
    ScriptCall,
    Steps,
    encode_mask,
    nothing,
    parse_actors,
    parse_publication,
    parse_stats,
    parse_texts,
    single,
    sliced,
)
from .values import (
    ActorSeen,
    LeasingPauses,
    RedisMemory,
    StaleMask,
    Stats,
    StoredPublication,
    SuspendedKey,
)

LAYOUT = "2"
"""Layout of the keys: a run goes on only under scripts of the same layout."""

USAGE_SAMPLE = 512
"""Tasks of one state whose bytes are counted, in a millisecond."""

BROKER_MEMORY_S = 3600
"""Time without a broker after which figures of brokers are deleted."""


def begin_run(
    config_hash: str,
    hashes: Mapping[str, str],
    *,
    units_per_batch: int,
    max_policy_lag: int,
    margin: float,
    group_size: int,
    min_group_size: int,
    vocabulary: int | None = None,
) -> Operation[None]:
    """Enter a run into the store; a run that is already there must have the same settings.

    Its vocabulary, the tokens of its model, is added to a run that an earlier release began.

    Raises:
        SettingsError: (when run) Another value is stored; the text names it.
    """
    fields = {f"hash:{name}": value for name, value in sorted(hashes.items())}
    fields |= {
        "layout": LAYOUT,
        "units_per_batch": str(units_per_batch),
        "max_policy_lag": str(max_policy_lag),
        "margin": repr(float(margin)),
        "group_size": str(group_size),
        "min_group_size": str(min_group_size),
        "config_hash": config_hash,
    }
    if vocabulary is not None:
        fields["vocabulary"] = str(vocabulary)

    def parse(reply: Reply) -> None:
        if reply:
            name, stored = reply[0].decode(), reply[1].decode()
            raise SettingsError(
                f"{name.removeprefix('hash:')} must be what the run began with, {stored!r}, "
                f"got {fields[name]!r}; go on with the settings, files and release of Nyala that "
                "it began with, or begin a new run"
            )

    return single("begin_run", (x for field in fields.items() for x in field), parse)


def stats() -> Operation[Stats]:
    """Count tasks by state, from the sets that hold them."""
    return single("stats", (), parse_stats)


def memory(*, of_run: bool = False) -> Operation[RedisMemory]:
    """Read the used memory of Redis, which is cheap enough for every tick.

    Args:
        of_run: Count the bytes of the run too.
    """

    def steps() -> Steps[RedisMemory]:
        used, limit = yield ScriptCall("memory", ())
        run_bytes = (yield from usage().steps()) if of_run else 0
        return RedisMemory(used, limit, run_bytes)

    return Operation("memory", steps)


def usage() -> Operation[int]:
    """Count the bytes of a run's records and unfinished completions.

    Exact for up to `USAGE_SAMPLE` tasks of each state; further tasks count as their mean.
    """
    return single("usage", (USAGE_SAMPLE,), int)


def closed() -> Operation[LeasingPauses]:
    """Read the suspended keys and a pause of the run, with reasons; empty where there is none."""

    def parse(reply: Reply) -> LeasingPauses:
        keys = {key.decode(): SuspendedKey(ms / 1000, _text(why)) for key, ms, why in reply[1:]}
        return LeasingPauses(_text(reply[0]), keys)

    return single("closed", (), parse)


def resume() -> Operation[bool]:
    """End a pause and all suspensions of keys; False if there was none."""
    return single("resume", (), bool)


def lineages() -> Operation[dict[int, int]]:
    """Read the step at which each lineage forked."""
    return single(
        "read", ("lineages",), lambda reply: {int(k): int(v) for k, v in parse_texts(reply).items()}
    )


def publication() -> Operation[StoredPublication | None]:
    """Read the publication of the current weights; None before the first."""
    return single("read", ("publication",), parse_publication)


def actors() -> Operation[list[ActorSeen]]:
    """List the actors that were heard within the hour."""
    return single("actors", (), parse_actors)


def broker_seen(endpoint: str, figures: Mapping[str, float]) -> Operation[None]:
    """Write the figures of the broker at an address, in place of earlier ones."""
    return single("broker_seen", (endpoint, json.dumps(figures), BROKER_MEMORY_S), nothing)


def brokers() -> Operation[dict[str, dict[str, float]]]:
    """Read the figures of each broker that served within the hour, by its address."""

    def parse(reply: Reply) -> dict[str, dict[str, float]]:
        return {endpoint: json.loads(text) for endpoint, text in parse_texts(reply).items()}

    return single("read", ("brokers",), parse)


def write_run_snapshot(lineage: int, text: bytes) -> Operation[None]:
    """Write the learner's run snapshot for brokers, in place of the one before."""
    return single("write_run_snapshot", (lineage, text), nothing)


def read_run_snapshot() -> Operation[bytes | None]:
    """Read the learner's newest run snapshot; None before the first."""
    return single("read_run_snapshot", (), lambda reply: reply)


def _text(value: bytes) -> str:
    return value.decode(errors="replace")


# --------------------------------------------------------------------------------------------------
# Recovery of a store that lost its last seconds: Redis restarted, failed over, or was set back.
#
#   RUNNING --confirm: another run_id--> RECOVERING --recovered--> RUNNING, nothing reaped for a ttl
#
# While RECOVERING, nothing is leased, claimed or reaped; actors may beat, submit, release and fail.
# The learner begins a lineage if the store forgot its own, reconciles each batch that it trained
# since its checkpoint, restores what the checkpoint holds, advances, commits, and ends the
# recovery:
#
#     reconcile, for each batch trained since the checkpoint
#     restore_committed, with the groups of the checkpoint
#     advance, commit, recovered
#
# Each may be sent again. `create` makes the tasks that the store forgot, and leaves committed ones
# alone.

UNITS_PER_CALL = 32
"""Units of one call, which seldom have more than 16 tasks each."""


def confirm(run_id: str) -> Operation[str]:
    """Compare the server's run_id with the one under which the run's data was last confirmed.

    Returns:
        The run's state: RECOVERING where they differ, NONE where the store has no such run.
    """
    return single("confirm", (run_id,), lambda reply: reply.decode())


def reconcile(
    lineage: int,
    k: int,
    group_ids: Sequence[int],
    *,
    sealed: bool = True,
    mask: StaleMask | None = None,
) -> Operation[int]:
    """Restore the units that batch k was trained on, in order; return how many had to move.

    Wherever the store has these units and their tasks, they go back into the claim of batch k, and
    all other units of that claim go back to the buffer. Records of the units may be missing.
    Committed units are left alone, and so are dead members: the batch was trained without them.
    """
    total = len(group_ids)
    seal = encode_mask(mask) if sealed else ""

    def steps() -> Steps[int]:
        moved = 0
        for first in range(0, max(total, 1), UNITS_PER_CALL):
            part = group_ids[first : first + UNITS_PER_CALL]
            moved += yield ScriptCall("reconcile", (lineage, k, total, seal, first, *part))
        return moved

    return Operation("reconcile", steps)


def restore_committed(lineage: int, group_ids: Sequence[int]) -> Operation[int]:
    """Mark units as inside a durable checkpoint; return how many the store had forgotten.

    Only states are changed, so any units may be given, in any order and repeatedly.
    """
    rows = [(group,) for group in group_ids]
    return sliced("restore_committed", (lineage,), rows, sum, size=UNITS_PER_CALL)


def recovered(lineage: int, run_id: str) -> Operation[int]:
    """End the recovery under this server; return the ms for which no lease is reaped.

    Raises:
        StoreRewound: (when run) Yet another server has answered since; reconcile again.
    """
    return single("recovered", (lineage, run_id), int)
