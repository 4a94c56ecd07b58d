"""A Redis Cluster refuses a call whose keys are not all on one node: a run's keys always are."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from buffer.operations.keys import run_prefix
from tests.buffer.support.cluster import low_port
from tests.buffer.support.history import History
from tests.buffer.support.servers import server
from tests.waiting import wait_until

SETTINGS = "cluster-enabled yes\ncluster-require-full-coverage no\n"


@pytest.fixture(scope="module")
def cluster_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A node of a cluster that has the keys of the histories' run, and no others."""
    folder: Path = tmp_path_factory.mktemp("cluster") / "node"
    with server(folder, SETTINGS, port=low_port()) as (_, port):
        url = f"redis://127.0.0.1:{port}/0"
        with redis.Redis.from_url(url, decode_responses=True) as client:
            wait_until(client.ping, ignoring=redis.RedisError)
            slot = client.execute_command("CLUSTER", "KEYSLOT", run_prefix("history"))
            client.execute_command("CLUSTER", "ADDSLOTS", slot)
            wait_until(
                lambda: "cluster_state:ok" in client.execute_command("CLUSTER", "INFO"),
                ignoring=redis.RedisError,
            )
        yield url


@pytest.mark.slow
def test_keys_of_another_node_are_refused_here(cluster_url: str) -> None:
    script, prefix = "redis.call('SET', ARGV[1], 1)", run_prefix("history")
    with redis.Redis.from_url(cluster_url) as client:
        client.eval(script, 1, prefix, prefix + ":meta")

        with pytest.raises(redis.RedisError, match=r"non local key|slot"):
            client.eval(script, 1, prefix, "nyala:history:meta")
        with pytest.raises(redis.RedisError, match="slot"):
            client.set("nyala:history:meta", 1)


@pytest.mark.parametrize("seed", range(3))
def test_random_histories_hold_on_a_cluster(cluster_url: str, seed: int) -> None:
    history = History(cluster_url, seed)
    try:
        history.play()
    finally:
        history.close()

    assert history.world.learner.step > 3
