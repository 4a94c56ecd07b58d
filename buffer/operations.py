"""Every operation on the store, as a value that `Store` and `AsyncStore` can run.

Who uses which (the table of keys is in `keys.py`):

| role    | operations |
| ------- | ---------- |
| anyone  | begin_run, stats, memory, publication, lineages, actors |
| broker  | lease, beat, submit, release, fail, reap, actor_seen |
| learner | begin_lineage, create, claim, drop, abandon, seal, advance, commit, cancel, publish, |
|         | records, eval_round, close_eval |

All of the learner's writes carry its lineage, the learner's fence: with a lower one than the run's
they raise LostLineage. Every operation may be sent again when its reply was lost; only
`claim(start=True)` would then count two starts.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence

from configs.errors import RecordError, SettingsError

from .answers import (
    ActorSeen,
    BeatLine,
    BeatVerdict,
    Claim,
    EvalRound,
    LeaseAnswer,
    Memory,
    NewTask,
    Publication,
    Stats,
)
from .keys import EVAL_BASE, MAX_TRAINING_TASKS
from .operation import SLICE, Argument, Call, Operation, Reply, Steps, repeated, single, sliced
from .replies import (
    parse_actors,
    parse_beats,
    parse_claim,
    parse_eval_round,
    parse_lease,
    parse_publication,
    parse_stats,
    parse_texts,
)

MAX_CHUNKS = 256
"""Length at which a task's chunk list is joined into one element."""

MAX_LEASES = 2000
"""Leases of one call: Lua cannot unpack much longer lists."""

RECORDS_PER_CALL = 64
"""Records of one reply: at most 1 GiB even when all are of the largest size."""

UNITS_PER_DROP = 32
"""Units that one call drops; they are seldom more than 16 tasks each."""

ACTOR_MEMORY_S = 3600
"""An actor silent for this long is forgotten."""

_REASON = re.compile(r"[a-z][a-z0-9_]{0,39}")


# Anyone


def begin_run(
    config_hash: str,
    hashes: Mapping[str, str],
    *,
    units_per_batch: int,
    max_policy_lag: int,
    margin: float,
    group_size: int,
    min_group_size: int,
) -> Operation[None]:
    """Enter a run into the store; a run that is already there must have the same settings.

    Raises:
        SettingsError: (when run) another value is stored; names which.
    """
    fields = {f"hash:{name}": value for name, value in sorted(hashes.items())}
    fields |= {
        "units_per_batch": str(units_per_batch),
        "max_policy_lag": str(max_policy_lag),
        "margin": repr(float(margin)),
        "group_size": str(group_size),
        "min_group_size": str(min_group_size),
        "config_hash": config_hash,
    }

    def parse(reply: Reply) -> None:
        if reply:
            name, stored = reply[0].decode(), reply[1].decode()
            raise SettingsError(
                f"{name.removeprefix('hash:')} must be what the run began with, {stored!r}, "
                f"got {fields[name]!r}; restore the settings or begin a new run"
            )

    return single("begin_run", (x for field in fields.items() for x in field), parse)


def stats() -> Operation[Stats]:
    """Count tasks by state, from the sets that hold them."""
    return single("stats", (), parse_stats)


def memory() -> Operation[Memory]:
    """Ask how full Redis is; cheap enough for every tick."""
    return single("memory", (), Memory._make)


def lineages() -> Operation[dict[int, int]]:
    """Read the step at which each lineage forked."""
    return single(
        "read", ("lineages",), lambda reply: {int(k): int(v) for k, v in parse_texts(reply).items()}
    )


def publication() -> Operation[Publication | None]:
    """Read where the current weights are; None before the first."""
    return single("read", ("publication",), parse_publication)


def actors() -> Operation[list[ActorSeen]]:
    """List the actors heard of within the hour."""
    return single("actors", (), parse_actors)


# The broker, on behalf of actors


def lease(
    incarnation: str, *, ttl_ms: int, n: int, version: tuple[int, int]
) -> Operation[LeaseAnswer]:
    """Grant at most `n` tasks to an actor whose engine is at `version`."""
    arguments = (incarnation, ttl_ms, min(n, MAX_LEASES), *version)
    return single("lease", arguments, parse_lease)


def beat(*, ttl_ms: int, lines: Sequence[BeatLine]) -> Operation[list[BeatVerdict]]:
    """Renew leases and append the chunks that came with them; one verdict per line, in order."""
    return sliced("beat", (ttl_ms, MAX_CHUNKS), lines, parse_beats)


def submit(submissions: Sequence[tuple[int, int, bytes]]) -> Operation[list[str]]:
    """Store finished episodes, each (task_id, fence, record); one verdict each, in order.

    Records go as they are: whoever calls has validated them and their size.
    """
    return sliced("submit", (), submissions, _verdicts)


def release(leases: Sequence[tuple[int, int]]) -> Operation[list[str]]:
    """Give (task_id, fence) leases back without charging an attempt."""
    return sliced("release", (), leases, _verdicts)


def fail(
    *, max_attempts: int, failures: Sequence[tuple[int, int, str, str]]
) -> Operation[list[str]]:
    """Report (task_id, fence, kind, reason) failures; too many make a task a dead letter."""
    rows = [(task, fence, kind, reason[:500]) for task, fence, kind, reason in failures]
    return sliced("fail", (max_attempts,), rows, _verdicts)


def reap(*, max_attempts: int, batch: int = SLICE) -> Operation[list[int]]:
    """Take back at most `batch` expired leases; returns their tasks."""
    return single("reap", (max_attempts, batch), lambda ids: [int(task) for task in ids])


def actor_seen(incarnation: str, fields: Mapping[str, str]) -> Operation[None]:
    """Note a sign of life and what came with it."""
    pairs = (x for field in fields.items() for x in field)
    return single("actor_seen", (incarnation, ACTOR_MEMORY_S, *pairs), _nothing)


# The learner


def begin_lineage(expected_lineage: int, fork_step: int) -> Operation[int | None]:
    """Take the run over at the step of a checkpoint, if its lineage is still the expected one.

    The operation has an owner's name of its own: sent again, it knows the lineage that it began.

    Returns:
        The new lineage; None when another learner was faster.
    """
    owner = secrets.token_hex(8)
    return single(
        "begin_lineage",
        (expected_lineage, fork_step, owner),
        lambda reply: reply[1] if reply[0] else None,
    )


def create(lineage: int, tasks: Sequence[NewTask]) -> Operation[int]:
    """Create tasks that the store does not know; returns how many.

    Training tasks come in whole groups: group g has the ids g * group_size and those after it.

    Raises:
        RecordError: at once, for ids that break these rules.
    """
    rows = _group_rows([task for task in tasks if task.eval_step is None])
    rounds: dict[int, list[tuple[int, bytes]]] = {}
    for task in tasks:
        if task.eval_step is not None:
            if task.task_id < EVAL_BASE:
                raise RecordError(f"evaluation ids must be >= 2**48, got {task.task_id}")
            rounds.setdefault(task.eval_step, []).append((task.task_id, task.spec))

    def steps() -> Steps[int]:
        created = 0
        if rows:
            size = len(rows[0]) - 1
            groups = yield from sliced(
                "create", (lineage, size), rows, sum, size=max(1, SLICE // size)
            ).steps()
            created += groups * size
        for step, members in rounds.items():
            created += yield from sliced("create_eval", (lineage, step), members, sum).steps()
        return created

    return Operation("create", steps)


def claim(lineage: int, k: int, units: int, *, start: bool = False) -> Operation[Claim]:
    """Fill batch k up to `units` from the oldest complete units, and say what it holds.

    What is in the batch stays in it until it is dropped or committed. `start=True` counts that
    a life of the learner begins with this batch. Empty while the run is PAUSED or RECOVERING.
    """

    def steps() -> Steps[Claim]:
        reply = [b"MORE"]
        begins = int(start)
        while reply[0] == b"MORE":
            reply = yield Call("claim", (lineage, k, units, begins, SLICE))
            begins = 0
        return parse_claim(reply, units)

    return Operation("claim", steps)


def drop(lineage: int, k: int, group_ids: Sequence[int], reason: str) -> Operation[int]:
    """Take units out of the unsealed batch k for good; returns how many tasks that were.

    Raises:
        RecordError: at once, when `reason` is not a short lower-case word.
    """
    _check_reason(reason)
    rows = [(group,) for group in group_ids]
    return sliced("drop", (lineage, k, reason), rows, sum, size=UNITS_PER_DROP)


def abandon(lineage: int, k: int, reason: str) -> Operation[int]:
    """Drop all of batch k, even sealed, so that it is claimed anew: it kills its learners.

    Raises:
        RecordError: at once, when `reason` is not a short lower-case word.
    """
    _check_reason(reason)
    return repeated("abandon", (lineage, k, reason, SLICE))


def seal(lineage: int, k: int) -> Operation[int]:
    """Freeze batch k, so that every replay of it is the same; returns its units."""
    return single("seal", (lineage, k), int)


def advance(lineage: int, k: int) -> Operation[None]:
    """Say that batch k is trained: its units no longer hold back new ones."""
    return single("advance", (lineage, k), _nothing)


def commit(lineage: int, k: int) -> Operation[int]:
    """Say that a durable checkpoint holds all batches up to k; returns the tasks committed."""
    return repeated("commit", (lineage, k, SLICE))


def cancel(lineage: int) -> Operation[int]:
    """End the run: cancel all that is not trained, evaluations too; returns the training tasks."""
    return repeated("cancel", (lineage, SLICE))


def publish(lineage: int, step: int, fields: Mapping[str, str]) -> Operation[None]:
    """Point actors to new weights: `digest`, `endpoint`, `public_key` of (lineage, step)."""
    pairs = (x for field in fields.items() for x in field)
    return single("publish", (lineage, step, *pairs), _nothing)


def records(task_ids: Sequence[int]) -> Operation[list[bytes | None]]:
    """Read the records of training tasks, in order; None where there is none."""
    rows = [(task,) for task in task_ids]
    return sliced("records", (), rows, _joined, size=RECORDS_PER_CALL)


def eval_round(lineage: int, step: int) -> Operation[EvalRound]:
    """Read an evaluation round: its records so far, and how many tasks are unfinished or failed.

    The records stay for an hour after the round is closed.
    """
    return single("eval_round", (lineage, step), parse_eval_round)


def close_eval(lineage: int, step: int) -> Operation[int]:
    """End an evaluation round; returns how many unfinished tasks it removed."""
    return single("close_eval", (lineage, step), int)


def _group_rows(tasks: Sequence[NewTask]) -> list[list[Argument]]:
    """One row per group: its id, then the specs of its members in order."""
    groups: dict[int, dict[int, bytes]] = {}
    for task in tasks:
        if not 0 <= task.task_id < MAX_TRAINING_TASKS:
            raise RecordError(f"training ids must be below 2**32, got {task.task_id}")
        groups.setdefault(task.group_id, {})[task.task_id] = task.spec
    size = len(next(iter(groups.values()), ()))
    for group, specs in groups.items():
        if sorted(specs) != list(range(group * size, group * size + size)):
            raise RecordError(
                f"group {group} must have the tasks {group * size} and the {size - 1} after it, "
                f"got {sorted(specs)[:8]}; create groups whole"
            )
    return [[group, *(specs[i] for i in sorted(specs))] for group, specs in groups.items()]


def _check_reason(reason: str) -> None:
    if not _REASON.fullmatch(reason):
        raise RecordError(f"reason must be lower-case letters, digits and _, got {reason!r:.60}")


def _verdicts(replies: list[Reply]) -> list[str]:
    return [verdict.decode() for reply in replies for verdict in reply]


def _joined(replies: list[Reply]) -> list[bytes | None]:
    return [record for reply in replies for record in reply]


def _nothing(_reply: Reply) -> None:
    return None
