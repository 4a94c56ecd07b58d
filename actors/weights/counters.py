"""What an actor counts of its weights."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TransferCounters:
    """What has happened so far."""

    broadcasts: int = 0
    memory_reads: int = 0
    """Versions read from the publisher's memory."""
    pulls: int = 0
    sparse_pulls: int = 0
    """Of these, by sparse updates."""
    pulled_bytes: int = 0
    peer_bytes: int = 0
    """Of these, from other actors."""
    store_bytes: int = 0
    """Of these, from the object store."""
    digest_mismatches: int = 0
    transfer_s: float = 0.0
    """From news to staged bytes, summed."""


@dataclass(frozen=True, slots=True)
class ReceiverCounters:
    """What has happened so far, for heartbeats and metrics."""

    updates: int
    """Swaps whose probe agreed."""
    broadcasts: int
    memory_reads: int
    """Versions read from the publisher's memory."""
    pulls: int
    sparse_pulls: int
    """Of these, by what had changed alone."""
    pulled_bytes: int
    peer_bytes: int
    """Of these, from other actors."""
    store_bytes: int
    """Of these, from the object store."""
    digest_mismatches: int
    probe_mismatches: int
    transfer_s: float
    """From news to staged bytes, summed; generation goes on meanwhile."""
    pause_s: float
    """Generation paused for swaps, summed."""
    probe_max_diff: float
    """Largest difference that passed, nats."""
