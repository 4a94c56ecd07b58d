"""Nodes of a Redis Cluster: which of them has the keys of a run, as far as is known.

All keys of a run have one hash tag, so they lie in one slot, on one node, and a client works with
that node alone. A node without the slot answers MOVED with the address of the one that has it, and
has done nothing, so the call may go there. After a call that had no answer the node is unknown, and
the nodes of the URL are asked before the next one.

    unknown --find--> known --MOVED--> known, another --no answer--> unknown

While a slot is moved key by key, its node answers ASK or TRYAGAIN to every call of ours, because a
run's prefix, by which calls are routed, is no key itself. That is taken for a store that is away:
nobody follows ASK, so nothing is done on a half of the keys, and the run waits until MOVED.
"""

from __future__ import annotations

from typing import Any

import redis
from redis.exceptions import MovedError

from buffer.operations.keys import run_prefix

from .address import cluster_urls, connect, disconnect, split_url, without_password
from .errors import explain

MAX_HOPS = 5
"""Redirections of one call; after the first, a node only names another while slots are moving."""
ENDLESS = "its nodes name each other"


class Nodes:
    """The node that a client of one run works with. A URL of another kind has one, for good."""

    def __init__(self, url: str, run: str) -> None:
        """Parse the URL; raises as `connect`."""
        self._url, self._run = url, run
        self.is_cluster = bool(cluster_urls(url))
        self.present = None if self.is_cluster else url
        """URL of the node; None = unknown."""

    def find(self) -> str:
        """Return the URL of the node, which is asked for where it is unknown.

        Raises:
            StoreError: No node answers.
        """
        if self.present is None:
            self.present = url_of_node(self._url, self._run)
        return self.present

    def change(self, moved: MovedError | None) -> None:
        """Take the node that an answer names; None = there was no answer."""
        if self.is_cluster:
            here = self.present
            self.present = _moved_to(here, moved) if here is not None and moved else None


def url_of_node(url: str, run: str) -> str:
    """Ask a cluster for the node that has a run's keys; any other URL stays as it is.

    Raises:
        StoreError: No node answers.
    """
    error = redis.RedisError(ENDLESS)
    for seed in cluster_urls(url):
        here = seed
        for _ in range(MAX_HOPS):
            client = connect(here)
            try:
                client.exists(run_prefix(run))
            except MovedError as moved:
                here, error = _moved_to(here, moved), moved
            except redis.RedisError as failed:
                error = failed
                break
            else:
                return here
            finally:
                disconnect(client)
    if not cluster_urls(url):
        return url
    raise explain(error, "look for the node", f"run {run!r} at {without_password(url)}") from error


def urls_of_primaries(url: str) -> list[str]:
    """Return a URL of each node of a cluster that has slots; any other URL stays as it is.

    Raises:
        StoreError: No node answers.
    """
    error = redis.RedisError(ENDLESS)
    for seed in cluster_urls(url):
        client = connect(seed)
        try:
            ranges: Any = client.execute_command("CLUSTER", "SLOTS")  # type: ignore[no-untyped-call]
        except redis.RedisError as failed:
            error = failed
        else:
            primaries = {(node[0].decode(), int(node[1])) for _, _, node, *_ in ranges}
            return [_at(seed, host, port) for host, port in sorted(primaries)]
        finally:
            disconnect(client)
    if not cluster_urls(url):
        return [url]
    raise explain(error, "look for nodes", without_password(url)) from error


def _moved_to(url: str, moved: MovedError) -> str:
    """Return the URL of the node that another one names."""
    return _at(url, moved.host, moved.port)


def _at(url: str, host: str, port: int) -> str:
    """Return a URL with another address; an empty host is that of the URL."""
    parts = split_url(url)
    user, at, here = parts.netloc.rpartition("@")
    host = host or here.rpartition(":")[0].strip("[]")
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return parts._replace(netloc=f"{user}{at}{address}").geturl()
