"""Actors of a random history: lease, generate, submit and give up, over a bad network."""

from __future__ import annotations

from typing import Any

from buffer import operations
from buffer.operations.operation import Operation
from buffer.operations.values import BeatLine, LeaseAnswer, LeasedTask, SubmitLine
from tests.buffer.support import history_talks as talks
from tests.buffer.support import invariants
from tests.buffer.support.history_world import (
    CAP,
    MARGIN,
    MAX_ATTEMPTS,
    MAX_POLICY_LAG,
    TTL_MS,
    UNITS_PER_BATCH,
    Actor,
    Held,
    World,
)


def lease(world: World) -> None:
    """An actor asks for work: fences are new (I8), admission holds (I14), the begun comes first."""
    actor = world.rng.choice(world.actors)
    if world.rng.random() < 0.5:
        actor.version = (world.learner.lineage, world.learner.step)
    n = world.rng.randint(1, 12)
    before = invariants.units_in_flight(world.client, world.prefix)
    call = operations.lease(actor.name, ttl_ms=TTL_MS, n=n, version=actor.version)
    answer = world.store.run(call)
    _check_admission(world, actor, answer, before)
    lineage, step = actor.version
    is_fresh = lineage == world.learner.lineage and world.learner.step - step <= MAX_POLICY_LAG
    if is_fresh and not world.recovering and len(answer.tasks) < n:
        waiting = world.client.zcard(f"{world.prefix}:ready")
        assert not waiting, f"I15: {waiting} tasks of started units were refused"
    for task in answer.tasks:
        highest = world.highest.get(task.task_id, 0)
        assert task.fence > highest, f"I8: task {task.task_id} was granted under an old fence"
        world.highest[task.task_id] = world.promises.holder[task.task_id] = task.fence
    if not world.chance(0.05):  # else the reply is lost, and the leases with it
        actor.held |= {task.task_id: _resume(world, task) for task in answer.tasks}


def generate(world: World) -> None:
    """An actor makes tokens and sends snapshots; requests and replies get lost."""
    actor = _someone(world)
    lineage, step = actor.version
    lines = []
    for held in actor.held.values():
        most = 0 if held.talks else held.target - len(held.tokens)
        for _ in range(min(world.rng.randint(0, 3), most)):
            held.tokens.append(f"{held.task}.{held.fence}.{len(held.tokens)}.{lineage}.{step}")
        chunk = "".join(token + " " for token in held.tokens[held.sent :]).encode()
        tokens = len(held.tokens) - held.sent
        lines.append(BeatLine(held.task, held.fence, held.sent, tokens, chunk))
        if world.chance(0.05):
            lines.pop()  # the chunk is lost, and the actor does not know
        held.sent = len(held.tokens)
    fences = {line.task_id: line.fence for line in lines}
    for task, verdict in exchange(world, operations.beat(ttl_ms=TTL_MS, lines=lines), fences):
        if verdict[0] == "GAP":
            actor.held[task].sent = verdict[1]
        elif verdict[0] != "OK":
            del actor.held[task]


def submit(world: World) -> None:
    """An actor submits what is finished; now and then it gives back or fails some of the rest."""
    actor = _someone(world)
    done = [held for held in actor.held.values() if held.is_finished]
    rows = [
        SubmitLine(held.task, held.fence, held.record(), teacher=world.teacher_of(held.task))
        for held in done
    ]
    fences = {held.task: held.fence for held in done}
    for task, verdict in exchange(world, operations.submit(rows), fences):
        if verdict in ("OK", "DUP"):
            world.promises.acked.add(task)
            talks.check_submitted(world, actor.held[task])
        del actor.held[task]
    some = list(actor.held.values())[:2]
    fences = {held.task: held.fence for held in some}
    if world.chance(0.1):
        exchange(world, operations.release(list(fences.items())), fences)
    elif world.chance(0.08):
        kind = world.rng.choice(["data", "infra"])
        failures = [(task, fence, kind, "bad") for task, fence in fences.items()]
        call = operations.fail(
            max_attempts=MAX_ATTEMPTS, max_data_failures=MAX_ATTEMPTS, failures=failures
        )
        exchange(world, call, fences)
    else:
        return
    for held in some:
        del actor.held[held.task]


def _check_admission(world: World, actor: Actor, answer: LeaseAnswer, before: int) -> None:
    """Compare the units in flight with the formula; closed while the store recovers."""
    if world.recovering:
        assert answer.status == "WAIT", f"8.6: LEASE answered {answer.status} while RECOVERING"
        return
    after = invariants.units_in_flight(world.client, world.prefix)
    same = actor.version[0] == world.learner.lineage
    behind = world.learner.step - actor.version[1] if same else 0
    cap = CAP - behind * UNITS_PER_BATCH * MARGIN
    assert behind <= MAX_POLICY_LAG or after <= before, f"I14: work for an actor {behind} behind"
    assert after <= max(before, cap + 1 - 1e-9), f"I14: {after} units, at most {cap} admitted"


def exchange(world: World, call: Operation[Any], fences: dict[int, int]) -> list[tuple[int, Any]]:
    """Send a request through a bad network; returns the verdicts that reach the actor."""
    if not fences or world.chance(0.05):
        return []
    verdicts = world.store.run(call)
    if world.chance(0.1):
        verdicts = world.store.run(call)
    if world.chance(0.1):
        world.late.append(call)
    for (task, fence), verdict in zip(fences.items(), verdicts, strict=True):
        word = verdict if isinstance(verdict, str) else verdict[0]
        made = world.client.hget(f"{world.prefix}:t:{task}", "made") if word == "DUP" else None
        current = fence == world.promises.holder.get(task) or made == b"%d " % fence
        assert current or word in ("STALE", "GONE"), f"I9: {word} for an old fence of {task}"
    return [] if world.chance(0.05) else list(zip(fences, verdicts, strict=True))


def _someone(world: World) -> Actor:
    return world.rng.choice(world.actors + (world.zombies if world.chance(0.4) else []))


def _resume(world: World, task: LeasedTask) -> Held:
    tokens = b"".join(task.chunks).decode().split()
    assert len(tokens) == task.length, f"I3: {task.length} tokens stored, got {tokens}"
    return Held(task.task_id, task.fence, tokens, len(tokens), world.talks(task.task_id))
