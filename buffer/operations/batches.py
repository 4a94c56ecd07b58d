"""The learner's batches, kept units and publication; every write carries the learner's lineage."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence

from buffer.record.object_store import LONGEST_REFERENCE
from configs.errors import RecordError, quoted

from .keys import record_key
from .operation import (
    SLICE,
    Fetch,
    Operation,
    Reply,
    ScriptCall,
    Steps,
    encode_mask,
    nothing,
    parse_claim,
    repeated,
    single,
    sliced,
)
from .values import Claim, Rating, ReusedUnit, StaleMask

RECORDS_PER_CALL, FIRST_RECORDS = 64, 4
"""Most records of a reply, and how many are asked for before their sizes are known."""
BYTES_PER_REPLY = 2**26
"""Bytes of a reply, which Redis keeps beside the records: of long records fewer are asked for."""

UNITS_PER_DROP = 32
"""Units that one call drops, which seldom have more than 16 tasks each."""

_REASON = re.compile(r"[a-z][a-z0-9_]{0,39}")


def begin_lineage(
    expected_lineage: int, fork_step: int, *, owner: str | None = None, at_least: int = 0
) -> Operation[int | None]:
    """Take the run over at the step of a checkpoint, if its lineage is still the expected one.

    Args:
        expected_lineage: Lineage that the store has now.
        fork_step: Step of the checkpoint.
        owner: Unique name of the take-over. The operation sent again finds the lineage that it
            began by this name; `restore_lineage` needs it too.
        at_least: Least new lineage, because a store that lost writes may have an older one.

    Returns:
        The new lineage; None when another learner was faster.
    """
    return single(
        "begin_lineage",
        (expected_lineage, fork_step, owner or new_owner(), at_least),
        lambda reply: reply[1] if reply[0] else None,
    )


def new_owner() -> str:
    """Make a unique name of a take-over."""
    return secrets.token_hex(8)


def restore_lineage(
    lineage: int, step: int, *, owner: str, lineages: Mapping[int, int]
) -> Operation[bool]:
    """Restore the lineage that this learner began, after the store lost writes.

    Args:
        lineage: Lineage that `begin_lineage` returned.
        step: Batches trained.
        owner: Owner that was passed to `begin_lineage`.
        lineages: Fork steps by lineage, as far as the learner knows.

    Returns:
        Whether the store had lost the lineage. Raises LostLineage (when run) if another learner
        began this or a later one.
    """
    pairs = (x for pair in lineages.items() for x in pair)
    return single("restore_lineage", (lineage, owner, step, *pairs), bool)


def claim(
    lineage: int,
    k: int,
    units: int,
    *,
    start: bool = False,
    num_read: int = 0,
    in_order: bool = False,
) -> Operation[Claim]:
    """Fill batch k up to `units` from the oldest complete units; return its units.

    A unit in the batch stays there until it is dropped or committed. The claim is empty while the
    run is PAUSED or RECOVERING.

    Args:
        lineage: Lineage of the learner.
        k: The batch.
        units: Units that the batch is to have.
        start: Count that a life of the learner begins with this batch.
        num_read: Units of the batch that the caller has read. All of them must still be in the
            batch. If there were no others, and the batch is not complete now, only new units are
            listed. A complete batch is always listed.
        in_order: The batch gets the k-th `units` by number, and no others, however long they take.
    """

    def steps() -> Steps[Claim]:
        reply = [b"MORE"]
        begins = int(start)
        while reply[0] == b"MORE":
            call = (lineage, k, units, begins, SLICE, num_read, int(in_order))
            reply = yield ScriptCall("claim", call)
            begins = 0
        return parse_claim(reply, units)

    return Operation("claim", steps)


def drop(lineage: int, k: int, group_ids: Sequence[int], reason: str) -> Operation[int]:
    """Take units out of the unsealed batch k for good; return the number of their tasks.

    Raises:
        RecordError: At once, when `reason` is not a short lower-case word.
    """
    _check_reason(reason)
    rows = [(group,) for group in group_ids]
    return sliced("drop", (lineage, k, reason), rows, sum, size=UNITS_PER_DROP)


def abandon(lineage: int, k: int, reason: str, *, to_dead_letters: bool = False) -> Operation[int]:
    """Give up all units of batch k, even a sealed one, so that it is claimed again; return tasks.

    Args:
        lineage: Lineage of the learner.
        k: The batch, which is not trained yet.
        reason: Reason for the counts of drops.
        to_dead_letters: The episodes are at fault: keep them as dead letters, not dropped.

    Raises:
        RecordError: At once, when `reason` is not a short lower-case word.
    """
    _check_reason(reason)
    return repeated("abandon", (lineage, k, reason, SLICE, int(to_dead_letters)))


def seal(
    lineage: int, k: int, ratings: Sequence[Rating] = (), *, mask: StaleMask | None = None
) -> Operation[int]:
    """Freeze batch k, so that every replay of it is the same; return the number of its units.

    Units with a rating are kept for reuse when the batch is committed. The mask is part of the
    claim until then.
    """
    rows = ((r.group_id, f"{r.uses} {r.born} {r.rank:.17g}") for r in ratings)
    return single("seal", (lineage, k, encode_mask(mask), *(x for row in rows for x in row)), int)


def advance(lineage: int, k: int) -> Operation[None]:
    """Mark batch k as trained: its units no longer hold back new ones."""
    return single("advance", (lineage, k), nothing)


def commit(lineage: int, k: int) -> Operation[int]:
    """Commit all batches up to k, which are in a durable checkpoint; return how many tasks."""
    return repeated("commit", (lineage, k, SLICE))


def publish(lineage: int, step: int, fields: Mapping[str, str]) -> Operation[None]:
    """Publish new weights to actors: `digest`, `endpoint`, `public_key` of (lineage, step)."""
    pairs = (x for field in fields.items() for x in field)
    return single("publish", (lineage, step, *pairs), nothing)


def records(task_ids: Sequence[int]) -> Operation[list[bytes | None]]:
    """Read the records of training tasks, in order; None for a missing one."""

    def steps() -> Steps[list[bytes | None]]:
        read: list[bytes | None] = []
        number, longest = FIRST_RECORDS, 1
        while len(read) < len(task_ids):
            part = task_ids[len(read) : len(read) + number]
            reply = yield Fetch(tuple(map(record_key, part)))
            read += reply
            longest = max(longest, *(len(record or b"") for record in reply))
            number = max(1, min(RECORDS_PER_CALL, BYTES_PER_REPLY // longest))
        return read

    return Operation("records", steps)


def references(task_ids: Sequence[int]) -> Operation[list[bytes]]:
    """Read the records that are short enough to be references; empty bytes for all others."""
    rows = [(task,) for task in task_ids]
    return sliced(
        "references", (LONGEST_REFERENCE,), rows, lambda parts: [r for part in parts for r in part]
    )


def claim_bytes(k: int) -> Operation[int]:
    """Sum up the bytes of batch k's records, which stay in the store until it is committed."""
    return single("claim_bytes", (k,), int)


def _check_reason(reason: str) -> None:
    if not _REASON.fullmatch(reason):
        raise RecordError(
            "a reason must be at most 40 lower-case letters, digits and _, and begin with a "
            f"letter, got {quoted(reason, 60)}; choose such a word"
        )


# --------------------------------------------------------------------------------------------------
# Replay of trained units: kept at COMMIT, drawn for later batches, forgotten.
#
#     seal(k, ratings) -> commit(k): kept -> reuse(k + n): in a batch -> commit(k + n): kept or gone
#
# A kept unit is committed: creation, admission and conservation do not count it. A unit that batch
# k drew stays there until the batch is committed or abandoned, so a replay of the batch is the
# same. Each unit is in one batch at a time, at most `uses` times in all.

DRAWS_PER_CALL = 200
"""Units that one call draws, in some microseconds each."""

UNITS_PER_CALL = 32
"""Kept units that one call deletes with their records."""


def reuse(
    lineage: int, k: int, units: int, *, sampling: str, numbers: Sequence[float]
) -> Operation[list[ReusedUnit]]:
    """Draw kept units for batch k until it has `units`; return its kept units.

    Each draw costs O(log n) of n kept units, because it takes one rank of a sorted set.

    Args:
        lineage: Lineage of the learner.
        k: The batch, which gets no more units once it is sealed.
        units: Kept units that the batch is to have, if there are so many.
        sampling: `newest` takes the first in the order of the ratings, `uniform` any unit with
            equal probability, `prioritised` the unit of rank r with about 1 / (r + 1).
        numbers: Random numbers in [0, 1), one for each draw.
    """

    def steps() -> Steps[list[ReusedUnit]]:
        reply: Reply = []
        for first in range(0, max(units, 1), DRAWS_PER_CALL):
            part = numbers[first : first + DRAWS_PER_CALL]
            reply = yield ScriptCall("reuse", (lineage, k, units, sampling, *part))
        return [
            ReusedUnit(int(gid), uses, tuple(int(task) for task in ids))
            for gid, uses, *ids in reply
        ]

    return Operation("reuse", steps)


def forget_reused(lineage: int, k: int, group_ids: Sequence[int]) -> Operation[int]:
    """Take kept units out of the unsealed batch k for good; return how many."""
    return single("forget_reused", (lineage, k, *group_ids), int)


def trim_replay(
    lineage: int, *, units: int, num_bytes: int, born: int, memory_share: float
) -> Operation[int]:
    """Forget the oldest kept units until the rest is within bounds; return how many went.

    Args:
        lineage: Lineage of the learner.
        units: Most units, including those that batches have drawn.
        num_bytes: Most bytes of their records.
        born: Oldest version of units that are kept.
        memory_share: Used share of Redis' maxmemory above which units go, whatever their number.
    """
    return repeated("trim_replay", (lineage, units, num_bytes, born, memory_share, UNITS_PER_CALL))


def clear_replay(lineage: int) -> Operation[int]:
    """Forget all kept units, including those that batches have drawn; return how many."""
    return repeated("clear_replay", (lineage, UNITS_PER_CALL))


def check_replay(
    lineage: int, checkpoint_step: int, reused: Mapping[int, Sequence[int]]
) -> Operation[int]:
    """Forget all kept units if the store, after it lost writes, lacks a use of one of them.

    Otherwise a unit could be trained more often than it may be.

    Args:
        lineage: Lineage of the learner.
        checkpoint_step: Batches inside its newest durable checkpoint.
        reused: Groups that each batch since then reused.

    Returns:
        Number of units that were forgotten.
    """
    rows = [x for k, groups in sorted(reused.items()) for x in (k, len(groups), *groups)]

    def steps() -> Steps[int]:
        is_whole = yield ScriptCall("replay_is_whole", (lineage, checkpoint_step, *rows))
        return 0 if is_whole else (yield from clear_replay(lineage).steps())

    return Operation("check_replay", steps)
