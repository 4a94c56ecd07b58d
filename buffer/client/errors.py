"""Errors of Redis as errors of Nyala, naming the setting or server to look at.

Owns the wording, and the distinction between errors that pass and errors that stay.
"""

from __future__ import annotations

import re

import redis
from redis import exceptions

from configs.errors import (
    LostLineage,
    StoreError,
    StoreRestarted,
    StoreRewound,
    StoreUnreachable,
)

from .server_identity import NewServerIdentity

_REFUSALS = {
    "NORUN": "the store must know the run, got no entry for it; begin_run comes first",
    "REWOUND": "the store's lineage must be at least the learner's, got {0}; the store lost writes",
    "COMMITTED": "a claimed batch must be newer than the last committed one, got one <= {0}",
    "SEALED": "units can be dropped only before a batch is sealed; batch {0} is",
    "UNCLAIMED": "a sealed batch must have units, got none in batch {0}",
    "UNSEALED": "only sealed batches are trained and committed; batch {0} is not sealed",
    "TRAINED": "an abandoned batch must not be trained yet, got one <= {0}; weights contain it",
    "UNTRAINED": "a committed batch must be trained, got one > {0}; advance comes first",
    "BACKWARDS": "versions of a lineage must not decrease, got one below {0}",
    "RESTARTED": "the server that was recovered must still answer, got {0}; recover again",
    "DIGEST": "a version must keep its digest; other weights were published as step {0} before",
    "GROUPS": "groups of this run must have {0} tasks; the run began with other settings",
}

_PASSING_ERRORS = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.BusyLoadingError,
    exceptions.ReadOnlyError,  # a failover is under way
    exceptions.OutOfMemoryError,  # until the learner commits
    exceptions.TryAgainError,  # a slot is being moved
    exceptions.ClusterDownError,  # a failover is under way
)
_PASSING_CODES = re.compile(r"\b(READONLY|OOM|MISCONF|MASTERDOWN|NOREPLICAS) ")
"""Codes without a class in redis-py, or inside the text of a script's or transaction's error."""


def explain(error: redis.RedisError, operation: str, place: str) -> StoreError:
    """Turn an error of Redis into ours, with its meaning for the operation and a remedy."""
    text = str(error)
    code, _, detail = text.partition(" ")
    if code == "LOST":
        return LostLineage(
            f"{operation}: {place} belongs to lineage {detail}; this learner must stop"
        )
    if isinstance(error, NewServerIdentity):
        restarted = StoreRestarted(f"{operation}: {text}; ask again when it is recovered ({place})")
        restarted.run_id = error.run_id
        return restarted
    if code in _REFUSALS:
        refusal = StoreRewound if code in ("NORUN", "REWOUND", "RESTARTED") else StoreError
        return refusal(f"{operation}: {_REFUSALS[code].format(detail)} ({place})")
    kind = StoreUnreachable if _is_away(error) else StoreError
    return kind(f"{operation}: {_reason(error, text)} ({place})")


def _is_away(error: redis.RedisError) -> bool:
    """Whether the same call, unchanged, may succeed in a while."""
    if isinstance(error, exceptions.AuthenticationError):
        return False
    if isinstance(error, _PASSING_ERRORS) or _is_moving(error):
        return True
    return _PASSING_CODES.search(str(error)) is not None


def _is_moving(error: redis.RedisError) -> bool:
    """Whether a node of a cluster has some of the run's keys, and another one the others."""
    is_asked = isinstance(error, exceptions.AskError) and not isinstance(
        error, exceptions.MovedError
    )
    return is_asked or isinstance(error, exceptions.TryAgainError)


def _reason_of_cluster(error: redis.RedisError) -> str | None:
    if _is_moving(error):
        return (
            "the run's keys are being moved to another node one by one, and it waits until all "
            "are there; move its slot at once, with CLUSTER MIGRATESLOTS"
        )
    if isinstance(error, exceptions.MovedError):
        where = f"{error.host}:{error.port}"
        return f"the run's keys are on the node {where}; name the cluster as redis+cluster://"
    if isinstance(error, exceptions.ClusterDownError):
        return f"the cluster does not serve this run ({error}); look at CLUSTER INFO"
    return None


def _reason(error: redis.RedisError, text: str) -> str:
    if (of_cluster := _reason_of_cluster(error)) is not None:
        return of_cluster
    if isinstance(error, exceptions.AuthenticationError) or "NOAUTH" in text or "WRONGPASS" in text:
        return "Redis refused the password; put the right one into the URL"
    if isinstance(error, exceptions.TimeoutError):
        return "Redis did not answer in time; it may have acted, so look at its load and ask again"
    if isinstance(error, exceptions.BusyLoadingError):
        return "Redis is still loading its data; ask again in some seconds"
    if isinstance(error, exceptions.ReadOnlyError) or "READONLY" in text:
        return "Redis is a read-only replica; point the URL to the primary"
    if "MISCONF" in text:
        return "Redis cannot save its data and takes no writes; look at its disk and its log"
    if isinstance(error, exceptions.NoPermissionError) or any(
        words in text for words in ("NOPERM", "user executing the script", "ACL failure")
    ):
        return f"Redis' access rules refuse this user ({text}); see configs/deploy/redis-users.acl"
    if isinstance(error, exceptions.OutOfMemoryError) or "OOM" in text:
        return "Redis is full; raise its maxmemory or let the learner checkpoint and commit"
    if isinstance(error, exceptions.ConnectionError):
        return f"Redis cannot be reached ({text}); start it or correct the URL"
    return f"Redis refused ({text})"
