"""Teachers at the broker: what they are given, and that nothing unscored is taken for scored."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from broker.protocol.messages import LeaseRequest, ReleaseRequest
from buffer import operations
from buffer.record.codec import decode_episode
from buffer.record.episode import PolicyVersion
from configs.errors import RefusedError
from configs.tables.environments import OneEnvironment
from tests.broker.support.records import record_of, scored, submission
from tests.broker.support.ring import FIRST, Ring, begin, ring, until_granted, until_seen

NO_VERSION = PolicyVersion(-1, -1)
ANY = LeaseRequest(64, NO_VERSION, takes_over=False)


def serve(story, redis_url: str, keys: Path, **settings) -> None:
    async def served() -> None:
        async with ring(redis_url, keys, **{"teacher": "a model", **settings}) as here:
            await begin(here.store, groups=1)
            await story(here)

    asyncio.run(asyncio.wait_for(served(), 60))


async def verdict_of(client, request) -> str:
    (verdict,) = (await client.submit(request)).verdicts
    return str(verdict.verdict.value)


def test_a_teacher_is_given_finished_records_and_hands_them_in_scored(
    redis_url: str, keys: Path
) -> None:
    async def story(here: Ring) -> None:
        actor, teacher = await here.actor(), await here.teacher()
        for lease in (await actor.lease(LeaseRequest(2, FIRST))).leases:
            assert await verdict_of(actor, submission(lease, teacher="teacher")) == "OK"
        wanted = (await teacher.lease(ANY)).leases

        assert [lease.task_id for lease in wanted] == [0, 1]
        assert [lease.spec.index for lease in wanted] == [0, 0]
        for lease in wanted:
            assert not (await here.store.run(operations.claim(1, 1, 1))).complete
            assert await verdict_of(teacher, submission(lease, scored(lease.chunks[0]))) == "OK"
        assert (await here.store.run(operations.claim(1, 1, 1))).complete
        for record in await here.store.run(operations.records([0, 1])):
            scores = decode_episode(record or b"").completion.teacher_logprobs
            assert scores is not None
            assert scores.tolist() == [-0.25] * 3

    serve(story, redis_url, keys)


def test_what_an_actor_hands_in_unscored_must_name_its_teacher(redis_url: str, keys: Path) -> None:
    async def story(here: Ring) -> None:
        actor, teacher = await here.actor(), await here.teacher()
        first, second = (await actor.lease(LeaseRequest(2, FIRST))).leases
        with pytest.raises(RefusedError, match="teacher of task 0 must be teacher, got ''"):
            await actor.submit(submission(first))
        with pytest.raises(RefusedError, match="must be teacher, got 'another'"):
            await actor.submit(submission(first, teacher="another"))
        await actor.submit(submission(first, teacher="teacher"))
        (wanted,) = await until_granted(teacher, 1)

        with pytest.raises(RefusedError, match="got some from an actor"):
            await actor.submit(submission(second, scored(record_of(second)), teacher="teacher"))
        with pytest.raises(RefusedError, match="got none from a teacher"):
            await teacher.submit(submission(wanted, wanted.chunks[0]))
        with pytest.raises(RefusedError, match="teacher of task 0 must be empty, got 'teacher'"):
            await teacher.submit(submission(wanted, scored(wanted.chunks[0]), teacher="teacher"))
        assert await verdict_of(teacher, submission(wanted, scored(wanted.chunks[0]))) == "OK"

    serve(story, redis_url, keys)


def test_environments_without_a_teacher_hand_in_what_is_done(redis_url: str, keys: Path) -> None:
    async def story(here: Ring) -> None:
        actor = await here.actor()
        for lease in (await actor.lease(LeaseRequest(2, FIRST))).leases:
            assert await verdict_of(actor, submission(lease)) == "OK"
        assert (await here.store.run(operations.claim(1, 1, 1))).complete

    words = OneEnvironment(name="words", environment="reasoning_gym")
    sums = OneEnvironment(name="sums", environment="calculator", share=0.01)
    serve(story, redis_url, keys, environments=(words, sums), teacher={"sums": "a model"})


def test_a_teacher_of_no_name_in_the_run_is_refused(redis_url: str, keys: Path) -> None:
    async def story(here: Ring) -> None:
        with pytest.raises(RefusedError, match="a teacher must be teacher, got 'words'; give one"):
            await here.teacher(name="words")

    serve(story, redis_url, keys)


def test_a_teacher_goes_on_where_memory_is_too_short_for_new_work(
    redis_url: str, keys: Path
) -> None:
    async def story(here: Ring) -> None:
        actor, teacher = await here.actor(), await here.teacher()
        lease, other = (await actor.lease(LeaseRequest(2, FIRST))).leases
        await actor.submit(submission(lease, teacher="teacher"))
        await here.parts.cache.refresh_memory()
        await actor.release(ReleaseRequest(((other.task_id, other.fence),)))

        assert (await actor.lease(LeaseRequest(1, FIRST))).status == "WAIT"
        assert [lease.task_id for lease in (await teacher.lease(ANY)).leases] == [0]

    serve(story, redis_url, keys, max_run_bytes=1)


def test_a_teacher_reads_records_out_of_the_object_store(
    redis_url: str, keys: Path, tmp_path: Path
) -> None:
    async def story(here: Ring) -> None:
        here.parts.service._inline_bytes = 1
        actor, teacher = await here.actor(), await here.teacher()
        for lease in (await actor.lease(LeaseRequest(2, FIRST))).leases:
            await actor.submit(submission(lease, teacher="teacher"))
        for lost in tmp_path.rglob("1-*"):  # noqa: ASYNC240 - nothing else runs
            lost.unlink()
        (wanted,) = (await teacher.lease(ANY)).leases

        assert decode_episode(wanted.chunks[0]).task_id == wanted.task_id == 0
        assert await verdict_of(teacher, submission(wanted, scored(wanted.chunks[0]))) == "OK"
        stats = await here.store.run(operations.stats())
        assert (stats.data_failures, stats.unscored) == (1, {"teacher": 1})

    serve(story, redis_url, keys, object_store=f"file://{tmp_path}")


def test_the_store_knows_which_peers_are_teachers(redis_url: str, keys: Path) -> None:
    async def story(here: Ring) -> None:
        await here.actor()
        await here.teacher()
        seen = {actor.incarnation: actor for actor in await until_seen(here, 2)}

        assert {name: actor.teacher for name, actor in seen.items()} == {
            "actor-1": "",
            "teacher-1": "teacher",
        }
        assert seen["actor-1"].samples(60)
        assert not seen["teacher-1"].samples(60)

    serve(story, redis_url, keys)
