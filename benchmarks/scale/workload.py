"""Workload of the simulated fleet, with the source of every number.

Nothing of a 7B model was measured by us: its speeds follow from published figures of one H100
(3.35 TB/s, 989 dense bfloat16 TFLOP/s) and are assumptions. Settings are Nyala's defaults; sizes of
records and updates are measured.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

GROUP_SIZE = 8
BYTES_A_TOKEN = 9
"""Of a record: id, log-prob, mask (`buffer/record`)."""
PROMPT_BYTES = 4 * 256
HEARTBEAT_S = 2.0
"""`actors.heartbeat_s`; a lease lasts `LEASE_TIMEOUT_S` without one."""
SNAPSHOT_S = 1.0
"""`actors.snapshot_s`: how often tokens of unfinished completions travel."""
LEASE_TIMEOUT_S = 15.0
SPARSE_SHARE = 1 / 197
"""`sparse_bytes_fewer` of `python -m benchmarks.weights`: learning rate 1e-6, bfloat16."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A model of 7B parameters that writes long answers."""

    groups_per_batch: int = 128
    learner_tokens_per_s: float = 160_000.0
    """16 GPUs of 10,000 tokens/s: six FLOP for each parameter and token, at 42 % of the peak."""
    median_tokens: float = 1500.0
    sigma: float = 1.0
    """Log-normal, as the episodes of `benchmarks/ring/slow_episodes.py`."""
    max_tokens: int = 16_384
    capacity: int = 64
    """`actors.max_concurrent_episodes`, one GPU each."""
    step_s: float = 0.010
    """Of the engine with few sequences: 15 GB of weights take 4.5 ms, and as much again beside."""
    step_s_a_sequence: float = 0.000_15
    """More for each: about 2,000 tokens of keys and values, 0.1 GB, and sampling."""
    weight_bytes: float = 15.2e9
    """bfloat16."""
    uplink_bytes_per_s: float = 12.5e9
    """100 Gbit/s of the learner's machine."""
    life_s: float = 4 * 3600.0
    """Mean life of a spot machine; 0 = none is taken away."""
    start_s: float = 120.0
    """From the end of a machine to the first tokens of its successor."""

    @property
    def batch(self) -> int:
        """Episodes of a batch."""
        return self.groups_per_batch * GROUP_SIZE

    def length(self, random_: random.Random) -> int:
        """Draw the tokens of an episode."""
        drawn = random_.lognormvariate(math.log(self.median_tokens), self.sigma)
        return max(1, min(self.max_tokens, round(drawn)))

    def tokens_per_s(self, running: int) -> float:
        """Return the speed of each of so many sequences of one engine."""
        return 1.0 / (self.step_s + self.step_s_a_sequence * running)


TRANSPORTS = ("broadcast", "sparse", "pull")
"""How a version reaches the fleet: all at once; its changed values, or all of it, one by one."""


def arrival_s(workload: Workload, transport: str, actors: int) -> float:
    """Return how long a version takes to reach all actors, which share the learner's uplink."""
    whole_s = workload.weight_bytes / workload.uplink_bytes_per_s
    match transport:
        case "broadcast":
            return whole_s
        case "sparse":
            return actors * whole_s * SPARSE_SHARE
        case _:
            return actors * whole_s
