"""Faults of a random history: crashes, late messages, restarts of Redis."""

from __future__ import annotations

import copy
from dataclasses import dataclass

from buffer import operations
from configs.errors import StoreError
from tests.buffer.support import history_replay as replay
from tests.buffer.support import invariants
from tests.buffer.support.history_learner import create
from tests.buffer.support.history_world import (
    GROUP_SIZE,
    MAX_ATTEMPTS,
    Actor,
    Promises,
    World,
    units_of,
)


@dataclass(frozen=True)
class Saved:
    """All that was on the disk of Redis at some moment, and what had been promised by then."""

    keys: dict[bytes, bytes]
    promises: Promises

    @classmethod
    def take(cls, world: World) -> Saved:
        """Save the store."""
        found = world.client.keys(f"{world.prefix}:*")
        names = sorted(name for name in found if isinstance(name, bytes))
        with world.client.pipeline() as pipe:
            for name in names:
                pipe.dump(name)
            return cls(dict(zip(names, pipe.execute(), strict=True)), copy.deepcopy(world.promises))


def expire(world: World, share: float = 0.2) -> None:
    """Some leases run out and are reaped: not while the store recovers, nor in the grace after."""
    for leases in ("lease", "lease:score"):
        for task in sorted(invariants.zset(world.client, f"{world.prefix}:{leases}")):
            if world.rng.random() < share:
                world.client.zadd(f"{world.prefix}:{leases}", {str(task): 1})
    for task in sorted(invariants.zset(world.client, f"{world.prefix}:tickets")):
        if world.rng.random() < share / 4:
            world.client.zadd(f"{world.prefix}:tickets", {str(task): 1})
    reaped = world.store.run(operations.reap(max_attempts=MAX_ATTEMPTS))
    if world.recovering or world.in_grace:
        assert not reaped, f"8.6: {reaped} were reaped before their actors could beat again"


def crash(world: World) -> None:
    """An actor dies, or seems to: it may act again after its successor began."""
    if world.chance(0.3):
        index = world.rng.randrange(len(world.actors))
        dead = world.actors[index]
        world.zombies = [*world.zombies[-2:], dead]
        world.actors[index] = Actor(dead.name + "'", dead.version)


def arrive_late(world: World) -> None:
    """A request of long ago arrives once more."""
    if world.late:
        world.store.run(world.late.pop(world.rng.randrange(len(world.late))))


def requeue(world: World) -> None:
    """An operator tries a dead letter again; a unit that had ended begins anew, whole."""
    dead = sorted(invariants.zset(world.client, f"{world.prefix}:dead"))
    if not dead or world.recovering:
        return
    task = world.rng.choice(dead)
    (verdict,) = world.store.run(operations.requeue_dead([task]))
    if verdict == "ANEW":
        unit = task // GROUP_SIZE
        world.promises.acked -= set(range(unit * GROUP_SIZE, (unit + 1) * GROUP_SIZE))
        world.begun_anew += 1


def end_grace(world: World) -> None:
    """Time passes: leases that ran out since the recovery may be reaped."""
    if not world.recovering and world.in_grace:
        world.client.hset(f"{world.prefix}:meta", "grace_until", 0)
        world.in_grace = False


def restart_redis(world: World, saved: Saved | None) -> None:
    """Redis is killed; with `saved`, the machine lost its power and the disk has an older state."""
    world.client.script_flush()
    if saved is not None:
        world.client.flushdb()
        with world.client.pipeline() as pipe:
            for name, payload in saved.keys.items():
                pipe.restore(name, 0, payload)
            pipe.execute()
        world.promises = copy.deepcopy(saved.promises)
        world.rewinds += 1
        world.tickets.clear()
        step = world.learner.step
        learner = world.learner
        learner.sealed = {k: v for k, v in learner.sealed.items() if k <= step}
        learner.drawn = {k: v for k, v in learner.drawn.items() if k <= step}
    world.server = f"{world.rng.getrandbits(160):040x}"
    state = world.store.run(operations.confirm(world.server))
    assert state == "RECOVERING", f"8.6: a new server life, and the run is {state}"
    world.recovering = True


def recover(world: World) -> None:
    """The learner says again what it trained; then the run goes on, with a grace for leases."""
    learner, durable = world.learner, len(world.learner.checkpoint)
    learner.known.clear()
    restore = operations.restore_lineage(
        learner.lineage, learner.step, owner=learner.owner, lineages=world.forks
    )
    world.tell(restore)
    replay.recover(world)
    committed = [unit for tasks in learner.checkpoint for unit in units_of(tasks)]
    world.tell(operations.restore_committed(learner.lineage, committed))
    for claim in world.store.run(operations.stats()).claims:
        if claim.k <= durable:  # what it holds besides was not trained
            world.tell(operations.reconcile(learner.lineage, claim.k, ()))
    for k, tasks in enumerate(learner.trained[durable:], durable + 1):
        world.tell(operations.reconcile(learner.lineage, k, units_of(tasks)))
    world.reconciled |= {unit for tasks in learner.trained for unit in units_of(tasks)}
    world.tell(operations.advance(learner.lineage, learner.step))
    world.tell(operations.commit(learner.lineage, durable))
    if world.chance(0.1):
        before = world.server
        restart_redis(world, None)
        try:
            world.store.run(operations.recovered(learner.lineage, before))
        except StoreError:
            return
        raise AssertionError("8.6: recovered under a server that is gone")
    grace_ms = world.tell(operations.recovered(learner.lineage, world.server))
    world.recovering, world.in_grace = False, grace_ms > 0
    create(world, 0, world.created)
