"""Conversations outlast brokers and Redis; what Redis has lost ends them, and nothing else does."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from broker.protocol.messages import Beat, BeatRequest, Lease, LeaseRequest, Verdict
from buffer import operations
from buffer.record.codec import decode_completion
from buffer.store import AsyncStore, Store
from configs.settings import Settings
from console.run.redis_server import free_port
from tests.broker.support.broker_process import process
from tests.broker.support.ring import FIRST, RUN, Ring, begin, hello
from tests.broker.support.talks import (
    TOKENS,
    ActorSide,
    HostSide,
    agent_ring,
    answer_all,
    host_of,
)
from tests.learner.support.rewinding_redis import rewinding_redis
from tests.waiting import still_waits, until

CALLS = 30

AGENTS = "run.environment=agent"


async def keep_lease(actor: ActorSide) -> None:
    while True:
        beat = Beat(actor.lease.task_id, actor.lease.fence)
        await actor.client.beat(BeatRequest((beat,), FIRST), deadline_s=60)
        await asyncio.sleep(0.5)


@pytest.mark.slow
def test_an_agent_notices_only_a_pause_when_a_broker_and_redis_are_killed(
    tmp_path: Path, run_settings: Settings
) -> None:
    first_at, second_at = run_settings.broker.endpoint, f"tcp://127.0.0.1:{free_port()}"
    keys = run_settings.run.folder / "keys"

    async def story(url: str) -> None:
        store = AsyncStore(url, RUN)
        await begin(store, groups=1)
        here = Ring(store, first_at, keys)
        with (
            process(run_settings, url, AGENTS) as first,
            process(run_settings, url, AGENTS, f"broker.endpoint={second_at}"),
        ):
            client = here.client("actor-1", other_endpoints=[second_at])
            await client.hello(hello("actor-1"), deadline_s=30)
            actor = await ActorSide.begin(client)
            host = await HostSide.begin(host_of(here, other_endpoints=[second_at]))
            working = [
                asyncio.create_task(answer_all(actor, CALLS)),
                asyncio.create_task(keep_lease(actor)),
            ]
            for number in range(CALLS):
                if number == CALLS // 3:
                    first.send_signal(signal.SIGKILL)
                    first.wait()
                asking = asyncio.create_task(host.ask(b"turn %d" % number))
                if number == 2 * CALLS // 3:
                    await asyncio.to_thread(server.restart)
                reply = await asking
                assert (reply.number, reply.reply) == (number + 1, b"re: turn %d" % number)
            await working[0]
            working[1].cancel()
            assert await host.end() is Verdict.OK

            seen = await store.run(operations.inspect([actor.lease.task_id]))
            assert seen[actor.lease.task_id].length == TOKENS * CALLS
            assert seen[actor.lease.task_id].attempts == 0
        await here.close()

    with rewinding_redis(tmp_path / "redis") as server:
        asyncio.run(asyncio.wait_for(story(server.url), 120))


def test_the_next_actor_goes_on_where_the_dead_one_was(redis_url: str, keys: Path) -> None:
    async def story() -> None:
        async with agent_ring(redis_url, keys, lease_timeout_s=2.0, reap_every_s=0.1) as here:
            await begin(here.store, groups=1)
            dead = await ActorSide.begin(await here.actor())
            host = await HostSide.begin(host_of(here))
            answering = asyncio.create_task(answer_all(dead, 2))
            await host.ask(b"first")
            await host.ask(b"second")
            await answering
            asking = asyncio.create_task(host.ask(b"third"))  # which it has read and not answered

            successor = await here.actor("actor-2")

            async def granted() -> list[Lease]:
                leases = (await successor.lease(LeaseRequest(2, FIRST))).leases
                return [lease for lease in leases if lease.task_id == dead.lease.task_id]

            (lease,) = await until(granted, timeout_s=20.0)
            alive = ActorSide(successor, lease)
            assert sum(len(decode_completion(c).token_ids) for c in lease.chunks) == 2 * TOKENS
            calls = await alive.listen()
            assert calls is not None
            assert [call.is_answered for call in calls.calls] == [True, True, False]
            assert (await alive.say(3, b"at last")).verdict is Verdict.OK
            assert (await asking).reply == b"at last"

    asyncio.run(asyncio.wait_for(story(), 60))


def test_calls_that_a_rewound_store_has_lost_are_told_to_the_host_that_waits(
    tmp_path: Path, keys: Path
) -> None:
    async def story(url: str) -> None:
        async with agent_ring(url, keys, lease_timeout_s=60.0, long_poll_s=60.0) as here:
            await begin(here.store, groups=1)
            actor = await ActorSide.begin(await here.actor())
            host = await HostSide.begin(host_of(here))
            past = await asyncio.to_thread(server.remember)
            await host.call(b"lost")
            waiting = asyncio.create_task(host.hear(50.0, num_calls=1))
            assert await still_waits(waiting, 0.3)

            await asyncio.to_thread(server.restart, past)

            heard = await asyncio.wait_for(waiting, 20)
            assert heard is not None
            assert (heard.verdict, heard.num_calls) == (Verdict.OK, 0)
            host.number = 0
            assert await host.call(b"lost") is Verdict.OK
            assert (await actor.say(1, b"answer")).verdict is Verdict.OK

    with rewinding_redis(tmp_path / "redis") as server:
        asyncio.run(asyncio.wait_for(story(server.url), 60))


def test_a_reply_that_a_rewound_store_has_lost_ends_the_conversation(
    tmp_path: Path, keys: Path
) -> None:
    async def story(url: str) -> None:
        async with agent_ring(url, keys, lease_timeout_s=30.0) as here:
            await begin(here.store, groups=1)
            actor = await ActorSide.begin(await here.actor())
            host = await HostSide.begin(host_of(here))
            await host.call(b"first")
            past = await asyncio.to_thread(server.remember)
            await actor.say(1, b"heard, and lost")
            assert await host.hear() is not None

            await asyncio.to_thread(server.restart, past)
            gone = await host.hear(0.0)

            assert gone is not None and gone.verdict is Verdict.GONE
            assert (await actor.say(1, b"heard, and lost")).verdict is Verdict.OUTDATED
            with Store(url, RUN) as store:
                store.run(operations.recovered(1, store.server_run_id()))
            again = await ActorSide.begin(await here.actor("actor-2"))
            assert (again.lease.task_id, again.length) == (actor.lease.task_id, 0)

    with rewinding_redis(tmp_path / "redis") as server:
        asyncio.run(asyncio.wait_for(story(server.url), 60))
