"""Errors of Redis as errors of Nyala, naming the setting or server to look at.

Owns the texts, and the distinction between errors that pass and errors that stay.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import redis
from redis import exceptions

from configs.errors import (
    LostLineage,
    StoreError,
    StoreRestarted,
    StoreRewound,
    StoreUnfit,
    StoreUnreachable,
)

from .address import connect, disconnect
from .server_identity import NewServerIdentity, ServerInClusterMode

_REFUSALS = {
    "NORUN": "the store must have the run, got no entry of it; start its learner, which makes one",
    "REWOUND": "the store's lineage must be at least the learner's, got {0}; recover what it lost",
    "COMMITTED": "a claimed batch must be later than the committed ones, got one <= {0}; claim on",
    "SEALED": "units must be dropped before their batch is sealed, got sealed {0}; abandon it",
    "UNCLAIMED": "a batch must have units to be sealed, got none in batch {0}; claim some first",
    "UNSEALED": "a trained or committed batch must be sealed, got batch {0}; seal it first",
    "TRAINED": "an abandoned batch must be later than the trained ones, got one <= {0}; commit it",
    "UNTRAINED": "a committed batch must be trained, got one > {0}; advance first",
    "BACKWARDS": "versions of a lineage must not decrease, got one below {0}; publish a later one",
    "RESTARTED": "the server that was recovered must still answer, got {0}; recover again",
    "DIGEST": "a version must keep its digest, got another for step {0}; begin a new lineage first",
    "GROUPS": "groups of this run must have {0} tasks, got another number; restore run.group_size",
}

_PASSING_ERRORS = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.BusyLoadingError,
    exceptions.ReadOnlyError,  # a failover is under way
    exceptions.OutOfMemoryError,  # until the learner commits
)
_PASSING_CODES = re.compile(r"\b(READONLY|OOM|MISCONF|MASTERDOWN|NOREPLICAS) ")
"""Codes without a class in redis-py, or inside the text of a script's or transaction's error."""


@contextmanager
def asking(url: str, operation: str, place: str) -> Iterator[redis.Redis]:
    """Connect a client for a few commands, and turn its errors into Nyala's.

    Args:
        url: URL of Redis.
        operation: What the commands do, for errors.
        place: The run or server that they concern, for errors.

    Raises:
        StoreError: A command in the block failed, as `explain` describes it.
        SettingsError: The URL is none of Redis.
    """
    client = connect(url)
    try:
        yield client
    except redis.RedisError as error:
        raise explain(error, operation, place) from error
    finally:
        disconnect(client)


def explain(error: redis.RedisError, operation: str, place: str) -> StoreError:
    """Turn an error of Redis into Nyala's, with its meaning for the operation and a remedy.

    Returns:
        LostLineage, StoreRestarted, StoreRewound or StoreUnfit for what these stand for;
        StoreUnreachable if the same call may succeed later; any other as StoreError.
    """
    text = str(error)
    code, _, detail = text.partition(" ")
    if code == "LOST":
        return LostLineage(
            f"{operation}: {place} must belong to this learner, got lineage {detail} of a newer "
            "learner; let that one go on, and stop this one"
        )
    if isinstance(error, NewServerIdentity):
        restarted = StoreRestarted(f"{operation}: {text}; ask again when it is recovered ({place})")
        restarted.run_id = error.run_id
        return restarted
    if isinstance(error, ServerInClusterMode):
        return StoreUnfit(
            f"buffer.url must name one server, or the sentinels that watch it, got a server in "
            f"cluster mode ({place}); use one with `cluster-enabled no`, or "
            f"redis+sentinel://host:port,host:port/service/db"
        )
    if code in _REFUSALS:
        refusal = StoreRewound if code in ("NORUN", "REWOUND", "RESTARTED") else StoreError
        return refusal(f"{operation}: {_REFUSALS[code].format(detail)} ({place})")
    kind = StoreUnreachable if _is_passing(error) else StoreError
    return kind(f"{operation}: {_reason(error, text)} ({place})")


def _is_passing(error: redis.RedisError) -> bool:
    """Whether the same call may succeed later."""
    if isinstance(error, exceptions.AuthenticationError):
        return False
    if isinstance(error, _PASSING_ERRORS):
        return True
    return _PASSING_CODES.search(str(error)) is not None


def _reason(error: redis.RedisError, text: str) -> str:
    if isinstance(error, exceptions.AuthenticationError) or "NOAUTH" in text or "WRONGPASS" in text:
        return "Redis refused the password; put the right one into buffer.url or NYALA_REDIS_URL"
    if isinstance(error, exceptions.TimeoutError):
        return "Redis did not answer in time; it may have acted, so look at its load and ask again"
    if isinstance(error, exceptions.BusyLoadingError):
        return "Redis is still loading its data; ask again in some seconds"
    if isinstance(error, exceptions.ReadOnlyError) or "READONLY" in text:
        return "Redis is a read-only replica; name the primary, or its sentinels, in buffer.url"
    if "MISCONF" in text:
        return "Redis cannot save its data and takes no writes; look at its disk and its log"
    if isinstance(error, exceptions.NoPermissionError) or any(
        words in text for words in ("NOPERM", "user executing the script", "ACL failure")
    ):
        return f"Redis' access rules refuse this user ({text}); see configs/deploy/redis-users.acl"
    if isinstance(error, exceptions.OutOfMemoryError) or "OOM" in text:
        return (
            "Redis is full; raise its maxmemory, or wait until the learner commits and frees some"
        )
    if isinstance(error, exceptions.ConnectionError):
        return f"Redis cannot be reached ({text}); start it, or correct buffer.url"
    return f"Redis refused ({text}); see its log"
