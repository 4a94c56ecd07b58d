"""The parts of a broker that need no socket, and how they are joined."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from broker.protocol.messages import RECORD_MARGIN
from buffer.store import AsyncStore
from configs.errors import SettingsError
from configs.settings import BrokerSettings, Settings

from .audit import Audit
from .lanes import ReadingClock
from .leasing import Leasing
from .liveness import Liveness
from .service import Service
from .store_cache import StoreCache


@dataclass(frozen=True, slots=True)
class Components:
    """One of each per broker, shared by its loops."""

    audit: Audit
    peers: Liveness
    reading: ReadingClock
    """Of the peers' silence."""
    cache: StoreCache
    leasing: Leasing
    service: Service


def assemble(settings: Settings, store: AsyncStore, *, audit_file: Path | None) -> Components:
    """Build the parts of a broker.

    Args:
        settings: Of the run.
        store: Connected to the run's Redis.
        audit_file: Where joins, refusals and revocations are written; None = the log alone.

    Raises:
        SettingsError: the limits contradict each other.
    """
    _check_message_limit(settings.broker, settings.buffer.max_episode_bytes)
    audit = Audit(audit_file)
    reading = ReadingClock(time.monotonic)
    peers = Liveness(
        heartbeat_timeout_s=settings.broker.heartbeat_timeout_s,
        max_actors=settings.broker.max_actors,
        max_actors_per_key=settings.broker.max_actors_per_key,
        clock=reading,
    )
    buffer = settings.buffer
    cache = StoreCache(
        store, pause_at_memory=buffer.pause_at_memory, max_run_bytes=buffer.max_run_bytes
    )
    leasing = Leasing(store, settings.broker, peers, cache)
    service = Service(
        store,
        run=settings.run,
        broker=settings.broker,
        buffer=settings.buffer,
        peers=peers,
        cache=cache,
        leasing=leasing,
        audit=audit,
    )
    return Components(audit, peers, reading, cache, leasing, service)


def _check_message_limit(broker: BrokerSettings, max_episode_bytes: int) -> None:
    least = max_episode_bytes + RECORD_MARGIN
    if broker.max_message_bytes < least:
        raise SettingsError(
            f"broker.max_message_bytes must be >= buffer.max_episode_bytes + {RECORD_MARGIN} = "
            f"{least}, got {broker.max_message_bytes}; "
            "the largest episode would cut its actor's connection"
        )
