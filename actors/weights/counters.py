"""Counters of an actor's weight transfers and swaps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class WeightCounters:
    """Totals of this incarnation. Producers: transports and receiver. Consumer: heartbeats."""

    updates: int = 0
    """Swaps whose probe agreed."""
    broadcasts: int = 0
    """Versions received by a group."""
    group_bytes: int = 0
    """Bytes received by a group."""
    memory_reads: int = 0
    """Versions used where they lie in the publisher's memory."""
    overwritten: int = 0
    """Versions overwritten there before the engine had them, and fetched again."""
    pulls: int = 0
    """Versions pulled."""
    sparse_pulls: int = 0
    """Versions pulled by sparse updates."""
    adapter_pulls: int = 0
    """Versions pulled by adapters."""
    pulled_bytes: int = 0
    peer_bytes: int = 0
    """Bytes pulled from other actors."""
    digest_mismatches: int = 0
    probe_mismatches: int = 0
    read_backs: int = 0
    """Swaps after which the engine's storage was read."""
    read_back_s: float = 0.0
    """Time of these readings, in which no token is sampled."""
    storage_mismatches: int = 0
    transfer_s: float = 0.0
    """Time from announcements to staged bytes, summed; generation goes on meanwhile."""
    pause_s: float = 0.0
    """Time in which generation paused for swaps, summed."""
    last_transfer_s: float = 0.0
    """Time from the last announcement to its staged bytes."""
    last_pause_s: float = 0.0
    """Pause of generation for the last swap."""
    probe_mean: float = 0.0
    """Mean difference of the last probe that agreed, nats."""
    probe_max: float = 0.0
    """Largest difference of the last probe that agreed, nats."""
    probe_max_diff: float = 0.0
    """Largest difference of all probes that agreed, nats."""

    @property
    def of_last_version(self) -> dict[str, float]:
        """Figures of the last version, by their names in `Figures`."""
        return {
            "probe_mean": self.probe_mean,
            "probe_max": self.probe_max,
            "weight_transfer_s": self.last_transfer_s,
            "weight_pause_s": self.last_pause_s,
        }

    def note_probe(self, mean: float, largest: float) -> None:
        """Note the differences of a probe that agreed."""
        self.probe_mean, self.probe_max = mean, largest
        self.probe_max_diff = max(self.probe_max_diff, largest)
