"""Leases, partial and finished episodes, and failures: a broker's calls on behalf of actors.

Each call acts under the fence of a lease and with the tag of the sender's key. It is STALE where
the task was leased under another fence or key; a caller without keys has the tag "".

Numbers of many tasks go as one argument, because an argument costs the client more than its digits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from buffer.record.codec import MAX_RECORD_BYTES

from .keys import EVAL_BASE
from .operation import (
    SLICE,
    Argument,
    Operation,
    Reply,
    ScriptCall,
    Steps,
    nothing,
    parse_beats,
    parse_lease,
    parse_verdicts,
    single,
    sliced,
)
from .values import BeatLine, BeatVerdict, LeaseAnswer, SubmitLine

MAX_CHUNKS = 256
"""Length at which a task's chunk list is joined into one element."""

MAX_LEASES = 2000
"""Leases of one call, because Lua cannot unpack much longer lists."""

ACTOR_MEMORY_S = 3600
"""Silence after which an actor is forgotten."""


def lease(
    incarnation: str,
    *,
    ttl_ms: int,
    n: int,
    version: tuple[int, int],
    key: str = "",
    seq: int = 0,
    abandoned: Sequence[int] = (),
    begun_only: bool = False,
    teacher: str = "",
) -> Operation[LeaseAnswer]:
    """Grant at most `n` tasks to an actor whose engine is at `version`.

    The actor may add no tokens of older versions. An actor whose weights are more than
    `max_policy_lag` batches old gets only evaluations.

    Args:
        incarnation: Incarnation of the actor.
        ttl_ms: Time after which a lease expires unless it is renewed.
        n: Most tasks.
        version: Lineage and step of the actor's weights.
        key: Tag of the actor's key. Keys whose tags begin with the same `holder~` are one holder
            (`values.holder_of`).
        seq: Number of the request. The actor's last request, repeated because its answer was lost,
            gets the leases that it was granted and has not renewed, under the same fence. A lower
            number than the last gets nothing; 0 = the request is not repeated.
        abandoned: Earlier requests whose answers are not waited for. If the last granted request is
            among them, its leases that were not renewed are given back first.
        begun_only: Grant only tasks that another holder has given back or lost.
        teacher: Name of the teacher that asks, whatever its version: grant only finished tasks that
            wait for its score, each with its record in place of chunks. Empty = an actor asks.
    """
    given_up = "".join(f" {number} " for number in abandoned)
    place = (incarnation, ttl_ms, min(n, MAX_LEASES), *version, key, seq)
    return single("lease", (*place, given_up, int(begun_only), teacher), parse_lease)


def beat(
    *,
    ttl_ms: int,
    lines: Sequence[BeatLine],
    progress_timeout_ms: int = 120_000,
    max_attempts: int = 3,
    max_bytes: int = MAX_RECORD_BYTES,
    longest_ms: int = 0,
) -> Operation[list[BeatVerdict]]:
    """Renew leases and append the chunks that came with them; one verdict per line, in order.

    Args:
        ttl_ms: Time from now after which a lease expires.
        lines: Leases to renew.
        progress_timeout_ms: Time without new tokens after which a lease is TAKEN and its task is
            charged an attempt; 0 = no limit.
        max_attempts: Attempts without progress that make a task a dead letter.
        max_bytes: Most bytes of a task's chunks. A lease that came with so many may add twice the
            bytes of its own tokens. If small chunks exceed it together, GAP asks for all tokens in
            one chunk. A lease that brings more than half of it besides its first chunks is TAKEN.
        longest_ms: Age of a lease at which it is TAKEN; 0 = no limit.
    """
    head = (ttl_ms, MAX_CHUNKS, progress_timeout_ms, max_attempts, max_bytes, longest_ms)

    def steps() -> Steps[list[BeatVerdict]]:
        replies: list[Reply] = []
        for start in range(0, len(lines), SLICE):
            part = lines[start : start + SLICE]
            numbers = [
                f"{task} {fence} {at} {n} {oldest} {first} {last} {key}"
                for task, fence, at, n, _, key, oldest, first, last in part
            ]
            chunks = [line.chunk for line in part if line.num_tokens]
            replies.append((yield ScriptCall("beat", (*head, "\n".join(numbers), *chunks))))
        return parse_beats(replies)

    return Operation("beat", steps)


def submit(lines: Sequence[SubmitLine]) -> Operation[list[str]]:
    """Store finished episodes; one verdict per line, in order.

    The caller has validated the records and their size. OK: the store has it now. DUP: it had an
    episode of this lease. STALE: the lease has ended, was another's, or is a teacher's although the
    line names a teacher. GONE: the store has no such task. TAKEN: tokens are older than the lease
    allows, and the task goes on without them.

    A record that names a teacher is kept, but its task is done only when the teacher has leased it
    and submitted the record again, with its score.
    """

    def steps() -> Steps[list[str]]:
        replies: list[Reply] = []
        for start in range(0, len(lines), SLICE):
            part = lines[start : start + SLICE]
            holders = "\n".join(
                [
                    f"{task} {fence} {oldest} {teacher or '-'} {key}"
                    for task, fence, _, key, oldest, teacher in part
                ]
            )
            ahead = tuple([record for task, _, record, *_ in part if task < EVAL_BASE])
            evaluations = [record for task, _, record, *_ in part if task >= EVAL_BASE]
            replies.append((yield ScriptCall("submit", (holders, *evaluations), ahead)))
        return parse_verdicts(replies)

    return Operation("submit", steps)


def release(leases: Sequence[tuple[int, int]], key: str = "") -> Operation[list[str]]:
    """Give (task_id, fence) leases back without charging an attempt; one verdict each, in order."""
    return sliced("release", (key,), leases, parse_verdicts)


def fail(
    key: str = "",
    *,
    max_attempts: int,
    max_data_failures: int = 3,
    failures: Sequence[tuple[int, int, str, str]],
) -> Operation[list[str]]:
    """Report (task_id, fence, kind, reason) failures; one verdict each, in order.

    Too many failures make a task a dead letter. Reasons are cut to 500 characters.

    Args:
        key: Tag of the sender's key.
        max_attempts: Most failures of any other kind than `data`, counted since the last progress.
        max_data_failures: Most failures of the kind `data`, counted for ever, because another try
            on the same text would fail the same way.
        failures: Task, fence, kind and reason of each failure.
    """
    rows = [(task, fence, kind, reason[:500]) for task, fence, kind, reason in failures]
    return sliced("fail", (key, max_attempts, max_data_failures), rows, parse_verdicts)


def cut(
    leases: Sequence[tuple[int, int]], key: str = "", *, max_attempts: int
) -> Operation[list[str]]:
    """Take back (task_id, fence) leases that are larger than a message, without their chunks.

    An attempt is charged for a task without chunks, because the task itself is too large.

    Args:
        leases: Leases that could not be delivered.
        key: Tag of the key to which they were granted.
        max_attempts: Attempts without progress that make a task a dead letter.
    """
    return sliced("cut", (key, max_attempts), leases, parse_verdicts)


def shrink(num_bytes: int) -> Operation[tuple[int, int]]:
    """Drop chunks of ready tasks, the largest first, until `num_bytes` are free.

    Returns:
        Number of tasks that begin anew, and the bytes of their chunks.
    """
    return single("shrink", (num_bytes,), lambda reply: (reply[0], reply[1]))


def reap(*, max_attempts: int, batch: int = SLICE, every_ms: int = 1000) -> Operation[list[int]]:
    """Take back at most `batch` expired leases; return their tasks.

    After a gap between two reaps, or a jump of the server's clock, no lease is taken back for the
    time of a lease: heartbeats could not arrive, or deadlines are wrong.

    Args:
        max_attempts: Attempts without progress that make a task a dead letter.
        batch: Most leases of this call.
        every_ms: Usual pause between reaps; a much longer pause is a gap.
    """
    arguments = (max_attempts, batch, every_ms)
    return single("reap", arguments, lambda ids: [int(task) for task in ids])


def release_dead_actor(incarnation: str, key: str, *, max_attempts: int) -> Operation[list[int]]:
    """Take back every lease of an actor whose process has ended; return their tasks.

    `nyala up` calls it for actors of its machine. An attempt is charged, as by `reap`. Unless the
    run is RUNNING, the leases are left to expire.

    Args:
        incarnation: The dead actor. Its messages under these leases are STALE from now on.
        key: Tag of the actor's key; leases of another key under this name stay.
        max_attempts: Attempts without progress that make a task a dead letter.
    """
    arguments = (incarnation, key, max_attempts)
    return single("release_dead_actor", arguments, lambda ids: [int(task) for task in ids])


def suspend(key: str, reason: str, *, is_brief: bool = False) -> Operation[list[int]]:
    """Suspend a key, or a holder, for a minute, then for two, and at most for an hour.

    Its leases end, and it is granted none.

    Args:
        key: Tag of the key or the holder.
        reason: Reason for people.
        is_brief: Suspend for ten seconds, which do not lengthen the next suspension.

    Returns:
        The tasks of its leases, which others get without being charged an attempt.
    """
    limits_ms = (10_000, 10_000) if is_brief else (60_000, 3_600_000)
    arguments = (key, reason[:500], *limits_ms)
    return single("suspend", arguments, lambda ids: [int(task) for task in ids])


def share(
    key: str, lineage: int, n: int, *, still_ms: int, token_ms: float
) -> Operation[list[int]]:
    """Take at most `n` leases from the holder that has the most, for a key that has none.

    If the key's own holder has an even share, leases are taken from the fullest of its other keys.
    Each holder keeps at least an even share, and the leases that grow: with a token within
    `still_ms`, and one in each `token_ms` on average. A holder with twice an even share keeps no
    lease that it has not begun. No attempt is charged. An actor whose weights are of a later
    `lineage` than the run's gets no leases.

    Returns:
        The tasks, which are ready again with their tokens.
    """
    arguments = (key, lineage, n, still_ms, token_ms)
    return single("share", arguments, lambda ids: [int(task) for task in ids])


def actor_seen(seen: Mapping[str, Mapping[str, str]]) -> Operation[None]:
    """Record that actors were heard now, and their figures, by `values.actor_name`."""
    rows: list[tuple[Argument, ...]] = [
        (incarnation, len(fields), *(x for field in fields.items() for x in field))
        for incarnation, fields in seen.items()
    ]
    return sliced("actor_seen", (ACTOR_MEMORY_S,), rows, nothing)
