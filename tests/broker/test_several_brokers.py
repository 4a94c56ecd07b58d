"""Two broker processes over one Redis: actors spread over them, and go on when one is killed."""

from __future__ import annotations

import asyncio
import shutil
import signal

import pytest

from broker.client import BrokerClient
from broker.protocol.messages import BeatRequest, Enrol, LeaseRequest, Verdict
from broker.transport.allow_list import revoke
from broker.transport.keys import load_pair, new_pair
from buffer import operations
from buffer.store import AsyncStore
from configs.errors import RefusedError
from configs.loader import save
from configs.settings import Settings
from console.run.redis_server import free_port
from tests.broker.support.broker_process import process
from tests.broker.support.records import submission
from tests.broker.support.ring import FIRST, GROUP, RUN, Ring, begin, hello
from tests.waiting import until

pytestmark = pytest.mark.slow

GROUPS = 60


async def work(
    here: Ring, name: str, others: list[str], done: set[int], halfway: asyncio.Event
) -> str:
    """Make episodes until all are made; returns the broker it began at."""
    client = here.client(name, other_endpoints=others)
    began_at = client._connection.endpoint
    await client.hello(hello(name), deadline_s=30)
    while len(done) < GROUPS * GROUP:
        for lease in (await client.lease(LeaseRequest(2, FIRST))).leases:
            (line,) = (await client.submit(submission(lease))).verdicts
            if line.verdict in {Verdict.OK, Verdict.DUP}:
                assert lease.task_id not in done  # acknowledged once
                done.add(lease.task_id)
            await asyncio.sleep(0.01)
        if len(done) >= GROUPS * GROUP // 3:
            halfway.set()
    return began_at


async def until_told(actor: BrokerClient, endpoint: str, *, of: bool = True) -> None:
    """Beat until the answers say that a broker is there, or that it no longer is."""

    async def is_told() -> bool:
        return (endpoint in (await actor.beat(BeatRequest((), FIRST))).brokers) is of

    # A broker that ends says so: where it was killed it is forgotten after ten seconds.
    await until(is_told, timeout_s=30.0 if of else 5.0, every_s=0.1)


async def lease_for_ever(actor: BrokerClient) -> None:
    while True:
        await actor.lease(LeaseRequest(1, FIRST), deadline_s=20)


def test_actors_of_a_killed_broker_go_on_at_the_other(
    redis_url: str, run_settings: Settings
) -> None:
    first_at, second_at = run_settings.broker.endpoint, f"tcp://127.0.0.1:{free_port()}"
    changes = {"lease_timeout_s": 3.0, "reap_every_s": 0.1}  # two reapers, over the same leases
    settings = run_settings.model_copy(
        update={"broker": run_settings.broker.model_copy(update=changes)}
    )
    save(settings, settings.run.folder / "config.yaml")

    async def story() -> None:
        store = AsyncStore(redis_url, RUN)
        await begin(store, groups=GROUPS)
        here = Ring(store, first_at, settings.run.folder / "keys")
        done: set[int] = set()
        halfway = asyncio.Event()
        with (
            process(settings, redis_url) as first,
            process(settings, redis_url, f"broker.endpoint={second_at}"),
        ):
            working = [
                asyncio.create_task(work(here, f"actor-{number}", [second_at], done, halfway))
                for number in range(6)
            ]
            await halfway.wait()
            at_kill = len(done)
            first.send_signal(signal.SIGKILL)
            assert first.wait() == -signal.SIGKILL
            began_at = await asyncio.gather(*working)

        assert at_kill < GROUPS * GROUP
        assert set(began_at) == {first_at, second_at}
        claim = await store.run(operations.claim(1, 1, GROUPS))
        assert claim.complete
        tasks = sorted(task for unit in claim.units for task in unit.task_ids)
        assert tasks == list(range(GROUPS * GROUP))
        assert (await store.run(operations.stats())).leased == 0
        await here.close()

    asyncio.run(asyncio.wait_for(story(), 120))


def test_actors_go_to_a_broker_that_came_later_and_that_no_settings_name(
    redis_url: str, run_settings: Settings
) -> None:
    second_at = f"tcp://127.0.0.2:{free_port()}"

    async def story() -> None:
        store = AsyncStore(redis_url, RUN)
        await begin(store, groups=8)
        here = Ring(store, run_settings.broker.endpoint, run_settings.run.folder / "keys")
        actor = here.client("actor-1")
        with process(run_settings, redis_url) as first:
            await actor.hello(hello("actor-1"), deadline_s=30)
            with process(run_settings, redis_url, f"broker.endpoint={second_at}"):
                await until_told(actor, second_at)
                first.send_signal(signal.SIGKILL)
                first.wait()
                (lease, *_) = (await actor.lease(LeaseRequest(1, FIRST), deadline_s=20)).leases

                assert actor._connection.endpoint == second_at
                await actor.submit(submission(lease))
        await here.close()

    asyncio.run(asyncio.wait_for(story(), 120))


def test_a_broker_that_stops_in_order_is_named_to_nobody(
    redis_url: str, run_settings: Settings
) -> None:
    second_at = f"tcp://127.0.0.2:{free_port()}"

    async def story() -> None:
        store = AsyncStore(redis_url, RUN)
        await begin(store, groups=0)
        here = Ring(store, run_settings.broker.endpoint, run_settings.run.folder / "keys")
        actor = here.client("actor-1")

        with process(run_settings, redis_url):
            await actor.hello(hello("actor-1"), deadline_s=30)
            with process(run_settings, redis_url, f"broker.endpoint={second_at}") as second:
                await until_told(actor, second_at)
                second.send_signal(signal.SIGTERM)
                assert await asyncio.to_thread(second.wait, 30) == 0
            await until_told(actor, second_at, of=False)
        await here.close()

    asyncio.run(asyncio.wait_for(story(), 120))


def test_a_key_that_an_actor_registers_at_one_broker_holds_at_the_other(
    redis_url: str, run_settings: Settings
) -> None:
    second_at = f"tcp://127.0.0.1:{free_port()}"
    keys, others = run_settings.run.folder / "keys", run_settings.run.folder / "others"
    others.mkdir(mode=0o700)  # of another machine: the list alone is shared
    for name in ("broker.key", "broker.pub"):
        shutil.copy(keys / name, others)
    (others / "allowed").symlink_to(keys / "allowed")

    async def story() -> None:
        store = AsyncStore(redis_url, RUN)
        await begin(store, groups=1)
        here = Ring(store, run_settings.broker.endpoint, keys)
        with (
            process(run_settings, redis_url),
            process(
                run_settings, redis_url, f"broker.endpoint={second_at}", f"broker.keys={others}"
            ),
        ):
            pair = new_pair()
            holder = here.client("starting", keys=load_pair(keys, "enrolment"))
            registered = await holder.order(Enrol(pair.public.decode()), deadline_s=30)
            actor = here.client("actor-1", keys=pair, endpoint=second_at)
            await actor.hello(hello("actor-1"), deadline_s=30)
            assert (await actor.lease(LeaseRequest(1, FIRST))).leases

            revoke(keys, registered.text)
            with pytest.raises(RefusedError, match="revoked"):
                await lease_for_ever(actor)
        await here.close()

    asyncio.run(asyncio.wait_for(story(), 120))
