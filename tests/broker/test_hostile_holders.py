"""Actors that hold leases and misuse them: what they can take is what they hold, for a while."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import redis

from broker.client import BrokerClient
from broker.protocol.codec import decode, encode
from broker.protocol.messages import (
    Beat,
    BeatRequest,
    FailRequest,
    Failure,
    Lease,
    LeaseRequest,
    Refusal,
    ReleaseRequest,
    Verdict,
)
from broker.server.flow_control import MOST_FAILURES
from broker.transport.allow_list import Role, add, revoke
from broker.transport.keys import load_pair
from buffer import operations
from buffer.operations.keys import run_prefix
from buffer.record.codec import decode_completion, encode_completion
from buffer.record.episode import Completion, FenceRun, PolicyVersion, VersionSpan
from tests.broker.support.records import submission
from tests.broker.support.ring import FIRST, RUN, Ring, begin, hello, ring, until_granted

LONGEST = 10**7
"""Tokens of a run whose limit on them is not reached before the store's on bytes."""
LEAST_S = 1.0
"""An honest actor gets work again within this time."""


def long_chunk(tokens: int, fence: int, *, fences: tuple[FenceRun, ...] = ()) -> bytes:
    return encode_completion(
        Completion(
            token_ids=np.ones(tokens, np.int32),
            behaviour_logprobs=np.full(tokens, -1.0, np.float32),
            loss_mask=np.ones(tokens, np.uint8),
            versions=(VersionSpan(FIRST, 0),),
            fences=fences or (FenceRun(fence, "evil", 0),),
        )
    )


def used_memory(redis_url: str) -> int:
    with redis.Redis.from_url(redis_url) as client:
        return int(client.info("memory")["used_memory"])


async def honest_lease_s(here: Ring, n: int = 2) -> float:
    """How long an actor that comes now waits for its first leases."""
    honest = await here.actor("honest")
    began = time.monotonic()
    while True:
        reply = await honest.lease(LeaseRequest(n, FIRST), deadline_s=5)
        if reply.status == "OK":
            return time.monotonic() - began
        assert time.monotonic() - began < 20, f"no work: {reply.status}"


def test_endless_snapshots_fill_no_memory(redis_url: str, keys: Path) -> None:
    """Of chunks of 200 kB on two leases, none has twice what an episode of this run can have."""

    async def story() -> None:
        async with ring(redis_url, keys, max_completion_tokens=LONGEST) as here:
            await begin(here.store, groups=50)
            before = used_memory(redis_url)
            evil = await here.actor("evil")
            leases = (await evil.lease(LeaseRequest(2, FIRST))).leases
            tokens = 20_000
            chunk = long_chunk(tokens, leases[0].fence)
            for i in range(200):
                lines = tuple(
                    Beat(lease.task_id, lease.fence, i * tokens, tokens, chunk) for lease in leases
                )
                await evil.beat(BeatRequest(lines, FIRST), deadline_s=5)
            grown = used_memory(redis_url) - before
            assert grown < 5 * 2**18, f"Redis grew by {grown} bytes, of 72 MB that were sent"
            await evil.release(ReleaseRequest(tuple((t.task_id, t.fence) for t in leases)))
            assert await honest_lease_s(here) < LEAST_S

    asyncio.run(story())


def test_a_task_made_too_large_for_a_message_goes_on_to_others(redis_url: str, keys: Path) -> None:
    async def story() -> None:
        async with ring(redis_url, keys, max_completion_tokens=LONGEST) as here:
            await begin(here.store, groups=50)
            evil = await here.actor("evil")
            (lease,) = (await evil.lease(LeaseRequest(1, FIRST))).leases
            tokens = 20_000
            for i in range(10):  # larger together than the largest message, 1 MiB
                chunk = long_chunk(tokens, lease.fence)
                beat = Beat(lease.task_id, lease.fence, i * tokens, tokens, chunk)
                await evil.beat(BeatRequest((beat,), FIRST), deadline_s=5)
            await evil.release(ReleaseRequest(((lease.task_id, lease.fence),)))
            assert await honest_lease_s(here) < LEAST_S

    asyncio.run(story())


def test_a_task_that_no_message_can_carry_loses_its_tokens_and_at_last_dies(
    redis_url: str, keys: Path
) -> None:
    """Limits keep tasks from growing so large; a store of other settings may have one."""

    def grow(*, is_spec: bool) -> None:
        with redis.Redis.from_url(redis_url) as client:
            task = f"{run_prefix(RUN)}:t:0"
            if is_spec:
                client.hset(task, "spec", bytes(2**21))
                return
            client.hset(task, mapping={"len": 5, "bytes": 2**21})
            client.rpush(f"{task}:p", bytes(2**21))

    async def story() -> None:
        async with ring(redis_url, keys) as here:
            await begin(here.store, groups=1)
            actor = await here.actor("actor")
            leases = (await actor.lease(LeaseRequest(2, FIRST))).leases
            for turn in range(6):
                await actor.release(ReleaseRequest(tuple((t.task_id, t.fence) for t in leases)))
                grow(is_spec=turn > 2)
                leases = (await actor.lease(LeaseRequest(2, FIRST), deadline_s=5)).leases
                found = await here.store.run(operations.stats())
                held = {(lease.task_id, lease.length) for lease in leases}
                assert held <= {(0, 0), (1, 0)}, "tokens that nobody can be given stay"
                assert found.dead == (turn == 5), "the first three are nobody's fault"

    asyncio.run(story())


def test_a_lease_that_brings_too_much_is_over(redis_url: str, keys: Path) -> None:
    async def story() -> None:
        async with ring(redis_url, keys) as here:
            await begin(here.store, groups=1)
            evil = await here.actor("evil")
            (lease,) = (await evil.lease(LeaseRequest(1, FIRST))).leases
            # Few tokens, and a long name for each.
            names = tuple(FenceRun(lease.fence, "e" * 200, i) for i in range(500))
            chunk = long_chunk(500, lease.fence, fences=names)
            beat = Beat(lease.task_id, lease.fence, 0, 500, chunk)
            reply = await evil.beat(BeatRequest((beat,), FIRST), deadline_s=5)
            assert reply.verdicts[0].verdict is Verdict.OUTDATED

    asyncio.run(story())


def test_a_fence_read_in_anothers_chunks_does_nothing_to_its_other_tasks(
    redis_url: str, keys: Path
) -> None:
    """All tasks of one LEASE have one fence, and whoever resumes one of them reads it there."""
    add(keys, "hostile", Role.ACTOR)

    async def story() -> None:
        async with ring(redis_url, keys) as here:
            await begin(here.store, groups=1)
            honest = await here.actor("honest")
            first, other = (await honest.lease(LeaseRequest(2, FIRST))).leases
            beat = Beat(first.task_id, first.fence, 0, 3, long_chunk(3, first.fence))
            await honest.beat(BeatRequest((beat,), FIRST), deadline_s=5)
            await honest.release(ReleaseRequest(((first.task_id, first.fence),)))
            evil = here.client("evil", keys=load_pair(keys, "hostile"))
            await evil.hello(hello("evil"), deadline_s=5)
            (resumed,) = (await evil.lease(LeaseRequest(1, FIRST))).leases
            (run,) = decode_completion(resumed.chunks[0]).fences
            assert run.fence == other.fence, "it is no secret"
            beat = Beat(other.task_id, run.fence, 0, 0, b"")

            replies = [
                await evil.beat(BeatRequest((beat,), FIRST)),
                await evil.fail(failures_of((other,))),
                await evil.release(ReleaseRequest(((other.task_id, run.fence),))),
                await evil.submit(submission(other)),
            ]

            assert [reply.verdicts[0].verdict for reply in replies] == [Verdict.OUTDATED] * 4
            (verdict,) = (await honest.submit(submission(other))).verdicts
            assert verdict.verdict is Verdict.OK
            (verdict,) = (await evil.submit(submission(other))).verdicts
            assert verdict.verdict is Verdict.OUTDATED, "nor does it hear what became of them"

    try:
        asyncio.run(story())
    finally:
        revoke(keys, "hostile")


def failures_of(leases: tuple[Lease, ...], reason: str = "x") -> FailRequest:
    return FailRequest(tuple(Failure(t.task_id, t.fence, "data", reason) for t in leases))


async def fail_all(actor: BrokerClient, rounds: int) -> int:
    """Fail whatever the actor gets; returns how much that was."""
    failed = 0
    for _ in range(rounds):
        leases = (await actor.lease(LeaseRequest(64, FIRST), deadline_s=5)).leases
        await actor.fail(failures_of(leases), deadline_s=5)
        failed += len(leases)
    return failed


@pytest.mark.slow
def test_a_flood_of_failures_suspends_its_key_and_kills_no_task(redis_url: str, keys: Path) -> None:
    add(keys, "hostile", Role.ACTOR)

    async def story() -> None:
        async with ring(redis_url, keys) as here:
            await begin(here.store, groups=200)
            honest = await here.actor("honest")
            leases = (await honest.lease(LeaseRequest(2, FIRST))).leases
            evil = here.client("evil", keys=load_pair(keys, "hostile"))
            await evil.hello(hello("evil"), deadline_s=5)
            held = (await evil.lease(LeaseRequest(10, FIRST))).leases

            failed = await fail_all(evil, 12)

            assert failed <= 64, f"{failed} failures of one key"
            stats = await here.store.run(operations.stats())
            assert (stats.dead, stats.dropped) == (0, {})
            assert stats.leased == len(leases), "what the key holds goes to others"
            closed = await here.store.run(operations.closed())
            ((tag, key),) = closed.keys.items()
            assert load_pair(keys, "hostile").public.decode().startswith(tag)
            assert "evil on here" in key.why
            late = await evil.fail(failures_of(held))
            assert {v.verdict for v in late.verdicts} == {Verdict.OUTDATED}
            assert (await honest.lease(LeaseRequest(2, FIRST))).status == "OK"
            assert await here.store.run(operations.resume())
            assert await until_granted(evil, 2)

    try:
        asyncio.run(story())
    finally:
        revoke(keys, "hostile")


def test_a_key_that_was_suspended_begins_anew(redis_url: str, keys: Path) -> None:
    add(keys, "hostile", Role.ACTOR)

    async def story() -> None:
        async with ring(redis_url, keys) as here:
            await begin(here.store, groups=200)
            honest = await here.actor("honest")
            second = await here.actor("second")
            for actor in (honest, second):
                for lease in (await actor.lease(LeaseRequest(MOST_FAILURES, FIRST))).leases:
                    await actor.submit(submission(lease))
            evil = here.client("evil", keys=load_pair(keys, "hostile"))
            await evil.hello(hello("evil"), deadline_s=5)
            await fail_all(evil, 1)
            (key,) = (await here.store.run(operations.closed())).keys.values()
            assert key.left_s > 10, "it is certain"

            assert await here.store.run(operations.resume())
            leases = await until_granted(evil, 1)  # the broker has looked again
            await evil.fail(failures_of(leases), deadline_s=5)

            assert len(leases) == 1
            assert not (await here.store.run(operations.closed())).keys, "after a single failure"

    try:
        asyncio.run(story())
    finally:
        revoke(keys, "hostile")


def test_a_fault_of_the_run_suspends_its_actors_for_seconds_at_most(
    redis_url: str, keys: Path
) -> None:
    """A scorer that always fails: the first actor to fail is judged before others have failed."""
    add(keys, "hostile", Role.ACTOR)

    async def story() -> None:
        async with ring(redis_url, keys) as here:
            await begin(here.store, groups=200)
            second = await here.actor("second")
            await second.lease(LeaseRequest(2, FIRST))
            first = here.client("first", keys=load_pair(keys, "hostile"))
            await first.hello(hello("first"), deadline_s=5)
            await fail_all(first, 1)
            ((tag, key),) = (await here.store.run(operations.closed())).keys.items()
            assert key.left_s <= 10

            assert await fail_all(second, 2) == 128, "it fails as the first did"

            closed = await here.store.run(operations.closed())
            assert list(closed.keys) == [tag], "and is not suspended"
            assert "of them of: x" in closed.paused, "the run pauses, and says why"

    try:
        asyncio.run(story())
    finally:
        revoke(keys, "hostile")


def test_an_actor_of_a_lineage_to_come_disturbs_nobody(
    redis_url: str, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is granted nothing, so nothing is taken from others for it."""
    monkeypatch.setattr("broker.server.leasing.SHARE_STILL_MS", 0)
    add(keys, "hostile", Role.ACTOR)

    async def story() -> None:
        async with ring(redis_url, keys, long_poll_s=1.0) as here:
            await begin(here.store, groups=4)
            honest = await here.actor("honest")
            leases = (await honest.lease(LeaseRequest(8, FIRST))).leases
            evil = here.client("evil", keys=load_pair(keys, "hostile"))
            await evil.hello(hello("evil"), deadline_s=5)

            reply = await evil.lease(LeaseRequest(8, PolicyVersion(2, 0)), deadline_s=5)

            assert reply.status == "WAIT"
            verdicts = (await honest.fail(failures_of(leases))).verdicts
            assert [line.verdict for line in verdicts] == [Verdict.OK] * 8

    try:
        asyncio.run(story())
    finally:
        revoke(keys, "hostile")


@pytest.mark.slow
def test_a_run_whose_tasks_die_pauses_before_it_is_dead(redis_url: str, keys: Path) -> None:
    """A lone actor: whether it or the run is broken, nobody can tell."""

    async def story() -> None:
        async with ring(redis_url, keys) as here:
            await begin(here.store, groups=200)
            actor = await here.actor("actor")

            await fail_all(actor, 12)

            stats = await here.store.run(operations.stats())
            assert stats.dead == 11
            closed = await here.store.run(operations.closed())
            assert closed.paused == (
                "11 of the last 1000 tasks died, 11 of them of: x; 11 in the hands of actor"
            )
            assert await here.store.run(operations.resume())
            await actor.lease(LeaseRequest(2, FIRST), deadline_s=5)
            assert (await actor.lease(LeaseRequest(2, FIRST), deadline_s=5)).status == "OK"

    asyncio.run(story())


@pytest.mark.slow
def test_a_pause_that_one_holder_alone_has_caused_ends_when_another_comes(
    redis_url: str, keys: Path
) -> None:
    async def story() -> None:
        async with ring(redis_url, keys) as here:
            await begin(here.store, groups=200)
            evil = await here.actor("evil")
            await fail_all(evil, 12)
            assert (await here.store.run(operations.closed())).paused

            honest = await here.actor("honest")
            (lease,) = (await honest.lease(LeaseRequest(1, FIRST), deadline_s=5)).leases
            (verdict,) = (await honest.submit(submission(lease))).verdicts

            assert verdict.verdict is Verdict.OK
            assert not (await here.store.run(operations.closed())).paused

    asyncio.run(story())


@pytest.mark.slow
def test_a_pause_stays_when_the_next_holder_fails_as_well(redis_url: str, keys: Path) -> None:
    """So it is when the environment is broken: an operator has to look."""

    async def story() -> None:
        async with ring(redis_url, keys) as here:
            await begin(here.store, groups=200)
            first = await here.actor("first")
            await fail_all(first, 12)
            second = await here.actor("second")
            for _ in range(4):
                await fail_all(second, 1)
                await fail_all(first, 1)
            third = await here.actor("third")

            assert not (await third.lease(LeaseRequest(1, FIRST), deadline_s=5)).leases

            assert (await here.store.run(operations.closed())).paused
            assert (await here.store.run(operations.stats())).dead <= 30

    asyncio.run(story())


def test_a_key_that_says_hello_too_often_is_put_off(redis_url: str, keys: Path) -> None:
    async def story() -> None:
        async with ring(redis_url, keys, max_actors_per_key=2) as here:
            await begin(here.store, groups=2)
            async with here.raw_socket() as socket:
                codes = []
                for seq in range(30):
                    message = encode(hello("x"), run=RUN, incarnation="x", seq=seq)
                    await socket.send(message)
                    reply = decode(await socket.recv(), max_bytes=2**20).message
                    codes.append(reply.code if isinstance(reply, Refusal) else "")
            assert codes == [""] * 24 + ["busy"] * 6

    asyncio.run(story())


def test_a_key_that_holds_all_work_shares_it_with_one_that_has_none(
    redis_url: str, keys: Path
) -> None:
    add(keys, "hostile", Role.ACTOR)

    async def story() -> None:
        async with ring(redis_url, keys, long_poll_s=1.0, max_actors_per_key=2) as here:
            await begin(here.store, groups=20)
            for name in ("evil-1", "evil-2"):
                evil = here.client(name, keys=load_pair(keys, "hostile"))
                await evil.hello(hello(name, capacity=4096), deadline_s=5)
                await evil.lease(LeaseRequest(4096 if name == "evil-2" else 10, FIRST))
            assert (await here.store.run(operations.stats())).leased == 40

            judged_by_group = here.client("whole")
            await judged_by_group.hello(hello("whole", capacity=64), deadline_s=5)
            nothing = await judged_by_group.lease(LeaseRequest(64, FIRST, takes_over=False))
            assert not nothing.leases, "a member that waits for its group is no idle work"

            assert await honest_lease_s(here, n=64) < 2 * LEAST_S
            stats = await here.store.run(operations.stats())
            assert stats.leased == 40
            held = await here.store.run(operations.inspect())
            names = Counter(task.incarnation for task in held.values())
            assert (names["honest"], names["evil-1"] + names["evil-2"]) == (20, 20)

    try:
        asyncio.run(story())
    finally:
        revoke(keys, "hostile")
