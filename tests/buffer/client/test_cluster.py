"""Clients of a real Redis Cluster: they find a run's node, follow its slot, and wait for a half."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest
import redis

from buffer import operations
from buffer.admin import forget_run
from buffer.client.address import cluster_urls
from buffer.operations.keys import run_prefix
from buffer.operations.operation import Operation
from buffer.operations.values import LeasedTask, SubmitLine
from buffer.store import AsyncStore, Store
from configs.errors import SettingsError, StoreError, StoreUnreachable
from configs.settings import RunSettings
from console.run.checks.store import check_redis
from tests.buffer.support.cluster import Cluster, cluster
from tests.buffer.support.run_in_store import RunInStore
from tests.buffer.support.servers import PASSWORD

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes; the run `run` is on the second."""
    with cluster(tmp_path_factory.mktemp("cluster"), 2) as running:
        running.place({"run": 1})
        yield running


@pytest.fixture
def run(nodes: Cluster) -> Iterator[RunInStore]:
    """A run on the second node, with two groups."""
    plain = f"redis://:{PASSWORD}@127.0.0.1:{nodes.ports[1]}/0"
    with Store(nodes.url, "run") as store, RunInStore(store, plain) as begun:
        begun.create(2)
        yield begun
    if nodes.has("run", 0):
        nodes.move_at_once("run", 0, 1)
    forget_run(nodes.url, "run")


def test_both_clients_follow_a_run_whose_slot_moves(nodes: Cluster, run: RunInStore) -> None:
    lives: list[str] = []

    def admits(_run_id: str, state: str) -> bool:
        lives.append(state)
        return True

    async def created(other: AsyncStore) -> int:
        return (await other.run(operations.stats())).created

    async def story() -> None:
        other = AsyncStore(nodes.url, "run")
        other.watch(admits)
        try:
            assert await created(other) == 8
            nodes.move_at_once("run", 1, 0)
            assert run.stats().created == await created(other) == 8
            nodes.move_at_once("run", 0, 1)
            assert await created(other) == run.stats().created == 8
        finally:
            await other.close()

    asyncio.run(story())
    # The next node is another life of the store, in which a learner must look for lost writes.
    assert lives == ["RUNNING", "RECOVERING", "RECOVERING"]


def test_a_record_goes_to_the_node_that_has_the_run(nodes: Cluster, run: RunInStore) -> None:
    first, second, *_ = run.lease()

    async def story() -> None:
        other = AsyncStore(nodes.url, "run")
        try:
            assert await other.run(submit(first)) == ["OK"]
            nodes.move_at_once("run", 1, 0)
            assert await other.run(submit(second)) == ["OK"]
        finally:
            await other.close()

    asyncio.run(story())
    nodes.move_at_once("run", 0, 1)
    assert run.stats().buffered == 2


def submit(task: LeasedTask) -> Operation[list[str]]:
    return operations.submit([SubmitLine(task.task_id, task.fence, b"record")])


def test_a_run_whose_keys_move_one_by_one_is_closed_until_all_are_there(
    nodes: Cluster, run: RunInStore
) -> None:
    leased = run.lease()
    nodes.begin_move("run", 1, 0)
    for _ in range(2):  # before the first key has moved, and with a half of them at either node
        before = contents(nodes)
        for closed in (
            run.lease,
            lambda: run.store.run(submit(leased[0])),
            lambda: run.store.run(operations.claim(1, 1, 1)),
            run.stats,
            lambda: asyncio.run(in_a_loop(nodes, submit(leased[0]))),
        ):
            refused(closed)
        assert contents(nodes) == before
        nodes.move_keys("run", 1, 0, 5)

    while nodes.move_keys("run", 1, 0, 100):
        pass
    nodes.end_move("run", 1, 0)

    assert run.store.run(submit(leased[0])) == ["OK"]
    assert run.stats().buffered == 1
    nodes.move_at_once("run", 0, 1)


async def in_a_loop(nodes: Cluster, operation: Operation[list[str]]) -> list[str]:
    store = AsyncStore(nodes.url, "run")
    try:
        return await store.run(operation)
    finally:
        await store.close()


def refused(call: Callable[[], object]) -> None:
    """As a store that is away: to be sent again later."""
    with pytest.raises(StoreUnreachable, match="moved to another node one by one"):
        call()


def contents(nodes: Cluster) -> dict[str, str]:
    """Every key of the run, on whichever node, with all that it holds."""
    slot, found = nodes.slot_of("run"), {}
    for number in range(2):
        keys = nodes.ask(number, "GETKEYSINSLOT", slot, 1000)
        with redis.Redis(port=nodes.ports[number], password=PASSWORD) as node:
            for key in keys:
                node.execute_command("ASKING")
                found[key] = str(node.execute_command("DUMP", key))
    return found


def test_only_a_url_of_a_cluster_is_followed(nodes: Cluster, run: RunInStore) -> None:
    wrong = f"redis://:{PASSWORD}@127.0.0.1:{nodes.ports[0]}/0"
    with Store(wrong, "run") as store, pytest.raises(StoreError, match="name the cluster as redis"):
        store.run(operations.stats())


def test_no_node_answers(nodes: Cluster) -> None:
    away = nodes.url.partition(",")[0]
    with Store(away, "run") as store, pytest.raises(StoreUnreachable, match="cannot be reached"):
        store.run(operations.stats())


def test_a_run_is_checked_and_forgotten_at_its_node(nodes: Cluster, run: RunInStore) -> None:
    assert forget_run(nodes.url, "run") > 0
    assert run.redis.keys(f"{run_prefix('run')}*") == []
    check_redis(RunSettings(name="run", model="init"), nodes.url)


@pytest.mark.parametrize(
    "url", ["redis+cluster://", "redis+cluster://a:x", "redis+cluster://a:1/2"]
)
def test_a_url_without_nodes_or_with_a_database_is_refused(url: str) -> None:
    with pytest.raises(SettingsError, match="name at least one node, and no database but 0"):
        cluster_urls(url)


def test_a_url_of_a_cluster_names_its_nodes() -> None:
    assert cluster_urls("rediss+cluster://me:p%40ss@a:1,b,[::1]:3/?ssl_ca_certs=ca.pem") == [
        "rediss://me:p%40ss@a:1/0?ssl_ca_certs=ca.pem",
        "rediss://me:p%40ss@b:6379/0?ssl_ca_certs=ca.pem",
        "rediss://me:p%40ss@[::1]:3/0?ssl_ca_certs=ca.pem",
    ]
    assert cluster_urls("redis://a:1/0") == []
