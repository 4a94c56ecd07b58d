"""Invariants of the store at every moment, read with plain commands past the scripts.

I1 a task is in exactly one place and its state field agrees; I2 no task is lost; units likewise; a
record exists exactly where it is needed, and a unit's list of specs while it is new. The numbers
are those of the delivery protocol's table.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import redis


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Where every training task and every unit is."""

    tasks: dict[str, set[int]]
    units: dict[str, set[int]]
    known: set[int]
    buried_records: set[int]
    """Dead letters that still have a record."""

    def places_of(self, task: int) -> list[str]:
        """Name the places that hold a task."""
        return [place for place, ids in self.tasks.items() if task in ids]


STATES = {"ready": b"R", "lease": b"L", "done": b"D", "claimed": b"D", "dead": b"X"}
SCORING = {"unscored": b"R", "lease:score": b"L"}
"""Places of finished tasks that teachers are to score."""


def look(client: redis.Redis, prefix: str, group_size: int) -> Snapshot:
    """Read all sets of a run."""

    def ids(key: str) -> set[int]:
        if key in ("open", "done", "claimed"):
            return {int(member) for member in client.smembers(f"{prefix}:{key}")}
        return set(zset(client, f"{prefix}:{key}"))

    claims = {f"c:{k}": ids(f"c:{k}") for k in ids("claims")}
    units = {"new": ids("new"), "open": ids("open"), "buf": ids("buf"), **claims}
    reasons = [_text(reason) for reason in client.smembers(f"{prefix}:reasons")]
    fates = ["committed", "cancelled", "purged", *(f"dropped:{reason}" for reason in reasons)]
    tasks = {"new": _members(units["new"], group_size)}
    tasks |= {key: ids(key) for key in ("ready", "lease", "lease:score", "done", "claimed", "dead")}
    teachers = [_text(name) for name in client.smembers(f"{prefix}:teachers")]
    tasks["unscored"] = {task for name in teachers for task in ids(f"unscored:{name}")}
    tasks |= {fate: _bits(client.get(f"{prefix}:{fate}")) for fate in fates}
    buried = {task for task in tasks["dead"] if client.exists(f"{prefix}:e:{task}")}
    return Snapshot(tasks, units, _bits(client.get(f"{prefix}:known")), buried)


def check(client: redis.Redis, prefix: str, group_size: int) -> Snapshot:
    """Look, and assert I1, I2 and their like for units and records."""
    snapshot = look(client, prefix, group_size)
    tasks, units = snapshot.tasks, snapshot.units
    places = Counter(task for ids in tasks.values() for task in ids)
    twice = {task: snapshot.places_of(task) for task, count in places.items() if count > 1}
    assert not twice, f"I1: tasks in two places: {twice}"
    assert set(places) == snapshot.known, f"I2: lost {snapshot.known ^ set(places)}"
    held = Counter(unit for ids in units.values() for unit in ids)
    assert all(count == 1 for count in held.values()), f"I1: units in two places: {units}"

    with client.pipeline(transaction=False) as pipe:
        for task in sorted(snapshot.known):
            pipe.hget(f"{prefix}:t:{task}", "st")
            pipe.exists(f"{prefix}:e:{task}")
        found = pipe.execute()
    kept = _kept_tasks(client, prefix)
    for task, state, has_record in zip(
        sorted(snapshot.known), found[::2], found[1::2], strict=True
    ):
        (place,) = snapshot.places_of(task)
        assert state == (STATES | SCORING).get(place), (
            f"I1: task {task} in {place} has state {state}"
        )
        if task not in kept:
            _check_record(client, prefix, task, place, has_record=bool(has_record))

    specs = _specs(client, prefix, {task // group_size for task in snapshot.known})
    assert specs == dict.fromkeys(units["new"], group_size), "I2: specs of new units"
    in_claims = set().union(*(ids for name, ids in units.items() if name.startswith("c:")))
    of_claims = _members(in_claims, group_size) - tasks["dead"] - tasks["purged"]
    assert of_claims == tasks["claimed"], "I2: tasks of claims that no claim holds, or the reverse"
    unfinished = tasks["ready"] | tasks["lease"] | tasks["unscored"] | tasks["lease:score"]
    assert _members(units["open"], group_size) >= unfinished, "I2: unfinished tasks of no open unit"
    for unit in units["open"]:
        members = {int(task) for task in client.smembers(f"{prefix}:g:{unit}")}
        assert members == _members({unit}, group_size) & unfinished, f"I2: progress of unit {unit}"
    return snapshot


def _specs(client: redis.Redis, prefix: str, units: set[int]) -> dict[int, int]:
    """Which of some units have a list of specs, and how many are in it."""
    with client.pipeline(transaction=False) as pipe:
        for unit in units:
            pipe.llen(f"{prefix}:s:{unit}")
        return {unit: count for unit, count in zip(units, pipe.execute(), strict=True) if count}


def _kept_tasks(client: redis.Redis, prefix: str) -> set[int]:
    """Tasks of the units that are kept for reuse: they are committed and have their records."""
    units = [*zset(client, f"{prefix}:replay"), *zset(client, f"{prefix}:reused")]
    ids = [client.hget(f"{prefix}:x:{unit}", "ids") or b"" for unit in units]
    return {int(task) for line in ids for task in line.split()}


def _check_record(
    client: redis.Redis, prefix: str, task: int, place: str, *, has_record: bool
) -> None:
    """A record exists where it is needed; a rewind may take it, a poison batch leaves it behind."""
    key = f"{prefix}:t:{task}"
    if place in ("claimed", "done") and client.hexists(key, "reconciled"):
        return
    of_poison = client.hget(key, "record") if place == "dead" else None
    if of_poison is not None:
        assert has_record == bool(int(of_poison)), f"I10: the record of dead letter {task}"
        return
    assert has_record == (place in ("done", "claimed", *SCORING)), (
        f"I10: record of {task} in {place}"
    )


def units_in_flight(client: redis.Redis, prefix: str) -> int:
    """Count open and buffered units and those of batches not trained yet, for admission (I14)."""
    version = int(client.hget(f"{prefix}:meta", "version") or 0)
    units = client.scard(f"{prefix}:open") + client.zcard(f"{prefix}:buf")
    for k in zset(client, f"{prefix}:claims"):
        if k > version:
            units += client.zcard(f"{prefix}:c:{k}")
    return int(units)


def zset(client: redis.Redis, key: str) -> list[int]:
    """Read the numbers in a sorted set, in its order."""
    return [int(_text(member)) for member in client.zrange(key, 0, -1)]


def _text(member: object) -> str:
    assert isinstance(member, bytes)
    return member.decode()


def _members(units: set[int], group_size: int) -> set[int]:
    return {unit * group_size + i for unit in units for i in range(group_size)}


def _bits(bitmap: object) -> set[int]:
    octets = np.frombuffer(bitmap if isinstance(bitmap, bytes) else b"", np.uint8)
    return set(np.flatnonzero(np.unpackbits(octets)).tolist())
