"""Messages that are well-formed and impossible in this run: refused by name, without effect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from msgspec import structs

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
    Submission,
    SubmitRequest,
    Verdict,
)
from buffer import operations
from buffer.record.codec import (
    decode_completion,
    encode_completion,
    encode_episode,
    join_completions,
)
from buffer.record.episode import (
    Branch,
    Completion,
    Episode,
    FenceRun,
    PolicyVersion,
    VersionSpan,
)
from buffer.store import AsyncStore
from configs.errors import RecordError, RefusedError
from tests.broker.support.ring import (
    FIRST,
    RUN,
    begin,
    fingerprint,
    hello,
    ring,
    spec_of,
    until_announced,
    until_seen,
)
from tests.waiting import still_waits

VOCABULARY = 64
MOST = 1024  # run.max_prompt_tokens and run.max_completion_tokens
NEXT = PolicyVersion(1, 1)


def in_loop(story: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Make a test of a coroutine."""

    @wraps(story)
    def test(**fixtures: Any) -> None:
        asyncio.run(story(**fixtures))

    return test


def made(lease: Lease, tokens: int = 4, **changes: Any) -> Completion:
    """Tokens that an actor can have made under a lease, but for the changes."""
    possible = Completion(
        token_ids=np.full(tokens, VOCABULARY - 1, np.int32),
        behaviour_logprobs=np.full(tokens, -0.5, np.float32),
        loss_mask=np.ones(tokens, np.uint8),
        versions=(VersionSpan(FIRST, 0),),
        fences=(FenceRun(lease.fence, "actor-1", 0),),
    )
    return replace(possible, **changes)


def beat_of(lease: Lease, completion: Completion, offset: int = 0) -> BeatRequest:
    chunk = encode_completion(completion)
    tokens = len(completion.token_ids)
    return BeatRequest((Beat(lease.task_id, lease.fence, offset, tokens, chunk),), FIRST)


def submission_of(lease: Lease, completion: Completion, **changes: Any) -> SubmitRequest:
    episode = Episode(
        task_id=lease.task_id,
        group_id=lease.spec.group_id,
        purpose="train",
        prompt_ids=np.full(MOST, VOCABULARY - 1, np.int32),
        completion=completion,
        reward=1.0,
        reward_parts={"exact": 1.0},
        finish_reason="stop",
        environment_metrics={},
        incarnation="actor-1",
        started_at=1.0,
        finished_at=2.0,
    )
    record = encode_episode(replace(episode, **changes))
    return SubmitRequest((Submission(lease.task_id, lease.fence, record),))


async def one_lease(actor: BrokerClient) -> Lease:
    (lease,) = (await actor.lease(LeaseRequest(1, FIRST))).leases
    return lease


async def publish(store: AsyncStore, version: PolicyVersion) -> None:
    fields = {"digest": str(version), "endpoint": "tcp://here", "public_key": "k"}
    await store.run(operations.publish(*version, fields))


@asynccontextmanager
async def refusing(
    redis_url: str, keys: Path, reason: str
) -> AsyncIterator[tuple[BrokerClient, Lease]]:
    """An actor with a lease, whose message is to be refused and to change nothing."""
    async with ring(redis_url, keys) as running:
        await begin(running.store, groups=1, vocabulary=VOCABULARY)
        actor = await running.actor()
        lease = await one_lease(actor)
        before = fingerprint(redis_url)

        with pytest.raises(RefusedError, match=reason):
            yield actor, lease

        assert fingerprint(redis_url) == before


@in_loop
async def test_what_this_run_can_have_is_taken(redis_url: str, keys: Path) -> None:
    async with ring(redis_url, keys) as running:
        await begin(running.store, groups=1, vocabulary=VOCABULARY)
        await publish(running.store, FIRST)
        actor = await running.actor()
        lease = await one_lease(actor)

        chunk = await actor.beat(beat_of(lease, made(lease, MOST)))
        record = await actor.submit(submission_of(lease, made(lease, MOST)))

    assert chunk.verdicts[0].verdict is record.verdicts[0].verdict is Verdict.OK


@in_loop
async def test_branches_are_taken_in_chunks_and_in_a_record(redis_url: str, keys: Path) -> None:
    """The next holder gets the chunks as they were, with a parent before its chunk."""
    first, second = (Branch(2, 1),), (Branch(0, -2), Branch(3, 1))
    async with ring(redis_url, keys, environment="agent") as running:
        await begin(running.store, groups=1, vocabulary=VOCABULARY)
        await publish(running.store, FIRST)
        actor = await running.actor()
        lease = await one_lease(actor)

        await actor.beat(beat_of(lease, made(lease, 4, branches=first)))
        chunk = await actor.beat(beat_of(lease, made(lease, 4, branches=second), 4))
        await actor.release(ReleaseRequest(((lease.task_id, lease.fence),)))
        again = await one_lease(actor)
        stored = join_completions([decode_completion(chunk) for chunk in again.chunks])
        record = await actor.submit(submission_of(again, stored))

    assert chunk.verdicts[0].verdict is record.verdicts[0].verdict is Verdict.OK
    assert stored.branches == (Branch(2, 1), Branch(4, 2), Branch(7, 5))


@pytest.mark.parametrize(
    ("offset", "changes", "reason"),
    [
        (0, {"branches": (Branch(2, 1),)}, r"no branches unless run.environment is agent, got 1"),
        (0, {"token_ids": np.array([1, 2, 10**6, 3], np.int32)}, r"run.model = 64, got 1000000"),
        (
            0,
            {"fences": (FenceRun(2**53 - 1, "actor-1", 0),)},
            r"fences up to \d+, .* got 9007",
        ),
        (MOST - 3, {}, r"at most run.max_completion_tokens = 1024, got 1025"),
    ],
)
@in_loop
async def test_a_chunk_that_no_actor_can_have_made_is_refused(
    redis_url: str, keys: Path, offset: int, changes: Any, reason: str
) -> None:
    async with refusing(redis_url, keys, reason) as (actor, lease):
        await actor.beat(beat_of(lease, made(lease, **changes), offset))


@pytest.mark.parametrize(
    ("tokens", "changes", "reason"),
    [
        (8000, {}, r"run.max_completion_tokens = 1024, got 8000 tokens"),
        (4, {"prompt_ids": np.ones(MOST + 1, np.int32)}, r"run.max_prompt_tokens = 1024, got 1025"),
        (4, {"prompt_ids": np.full(3, VOCABULARY, np.int32)}, r"run.model = 64, got 64"),
    ],
)
@in_loop
async def test_a_record_that_no_actor_can_have_made_is_refused(
    redis_url: str, keys: Path, tokens: int, changes: Any, reason: str
) -> None:
    async with refusing(redis_url, keys, reason) as (actor, lease):
        await actor.submit(submission_of(lease, made(lease, tokens), **changes))


@in_loop
async def test_tokens_of_a_version_that_nobody_has_published_yet_wait(
    redis_url: str, keys: Path
) -> None:
    """The store may have been rewound: honest work is put off, and neither taken nor destroyed."""
    async with ring(redis_url, keys) as running:
        await begin(running.store, groups=1, vocabulary=VOCABULARY)
        await publish(running.store, FIRST)
        actor = await running.actor()
        lease = await one_lease(actor)
        await until_announced(actor, FIRST)
        ahead = made(lease, versions=(VersionSpan(NEXT, 0),))

        sending = asyncio.create_task(actor.submit(submission_of(lease, ahead), deadline_s=20))
        assert await still_waits(sending, 0.5)
        assert (await running.store.run(operations.stats())).buffered == 0
        await publish(running.store, NEXT)

        assert (await sending).verdicts[0].verdict is Verdict.OK


@in_loop
async def test_a_publication_that_this_broker_has_not_read_yet_delays_nobody(
    redis_url: str, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.server.server.PUBLICATION_S", 60.0)
    store = AsyncStore(redis_url, RUN)
    await begin(store, groups=1, vocabulary=VOCABULARY)
    await publish(store, FIRST)
    await store.close()
    async with ring(redis_url, keys) as running:
        actor = await running.actor()
        await until_announced(actor, FIRST)  # and the broker does not look again for a minute
        lease = await one_lease(actor)
        await publish(running.store, NEXT)  # another broker may have passed it on

        reply = await actor.beat(
            beat_of(lease, made(lease, versions=(VersionSpan(NEXT, 0),))), deadline_s=5
        )

        assert reply.verdicts[0].verdict is Verdict.OK


@pytest.mark.slow
@in_loop
async def test_figures_that_no_actor_has_are_refused_and_those_of_others_are_reported(
    redis_url: str, keys: Path
) -> None:
    """Sixty thousand names stopped Redis for seconds, 4,500 the report of a whole portion."""
    async with ring(redis_url, keys) as running:
        await begin(running.store, groups=1)
        await running.actor("honest")
        async with running.raw_socket() as evil:
            greeting = hello("evil")
            await evil.send(encode(greeting, run=RUN, incarnation="evil", seq=1))
            await evil.recv()
            for seq, names in enumerate((1, 4500, 60_000), start=2):
                beat = encode(BeatRequest((), FIRST), run=RUN, incarnation="evil", seq=seq)
                fields = msgpack.unpackb(beat)
                fields["stats"] = {f"s{i}": 1.0 for i in range(names)}
                await evil.send(msgpack.packb(fields))
                refused = decode(await evil.recv(), max_bytes=2**20).message
                assert isinstance(refused, Refusal), refused
                assert refused.code == "malformed"
        seen = await until_seen(running, 2)

    assert {actor.incarnation for actor in seen} == {"evil", "honest"}
    assert all("s0" not in actor.fields for actor in seen)


@pytest.mark.parametrize("field", ["incarnation", "host"])
@pytest.mark.parametrize("name", ["\x1b[2J evil", "right\u202eleft", "two\nlines", "", "x" * 201])
@in_loop
async def test_a_name_that_a_terminal_would_obey_is_refused(
    redis_url: str, keys: Path, field: str, name: str
) -> None:
    async with ring(redis_url, keys) as running:
        await begin(running.store, groups=1)
        incarnation = name if field == "incarnation" else "actor-1"
        greeting = hello(incarnation)
        if field == "host":
            greeting = structs.replace(greeting, host=name)

        with pytest.raises(RefusedError, match=f"{field} must have 1 to 200 printable characters"):
            await running.client(incarnation).hello(greeting)


@in_loop
async def test_a_reason_reaches_the_store_in_printable_characters(
    redis_url: str, keys: Path
) -> None:
    async with ring(redis_url, keys, max_data_failures=1) as running:
        await begin(running.store, groups=1)
        actor = await running.actor()
        lease = await one_lease(actor)

        await actor.fail(
            FailRequest((Failure(lease.task_id, lease.fence, "data", "boom \x1b[2J\nline"),))
        )

        (letter,) = await running.store.run(operations.dead_letters(0, 9))
        assert letter.why == r"boom \x1b[2J\nline"


@pytest.mark.parametrize(
    "changes",
    [
        {"reward_parts": {"\x1b[31mred": 1.0}},
        {"reward_parts": {f"part {i}": 1.0 for i in range(65)}},
        {"environment_metrics": {"x" * 101: 1.0}},
        {"environment_metrics": {"right\u202eleft": 1.0}},
        {"incarnation": "two\nlines"},
    ],
)
def test_names_in_a_record_are_few_short_and_printable(changes: Any) -> None:
    lease = Lease(1, 1, spec_of(1), 0)

    with pytest.raises(RecordError, match=r"printable characters|at most (64|100)"):
        submission_of(lease, made(lease), **changes)
