"""The fleet at work on a whole ring, and the memory of broker and Redis meanwhile."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.delivery.fleet import JOINED
from benchmarks.delivery.ring import LOOK_EVERY_S, Ring, ring
from benchmarks.support.workload import environment

GROUPS_PER_BATCH = 128  # the fleet holds 4,000 episodes, 500 groups, at a time
MAX_POLICY_LAG = 7
PROBES = 50  # actors in a process that has time for them; the times given are theirs
FOR_EVER = "1e6"
JOIN_S = 400.0  # CURVE and 600 messages for each of a thousand take a minute or three
SAMPLE_EVERY_S = 1.0
SETTLING = 1 / 3  # share of the samples that are left out of the slope: the fleet is joining


@dataclass(slots=True)
class Memory:
    """Bytes over time."""

    seconds: list[float] = field(default_factory=list)
    broker_rss: list[float] = field(default_factory=list)
    redis_used: list[float] = field(default_factory=list)
    redis_rss: list[float] = field(default_factory=list)

    def sample(self, running: Ring, now: float) -> None:
        """Look once."""
        assert running.broker.pid is not None
        figures = running.client.info("memory")
        self.seconds.append(now)
        self.broker_rss.append(resident_bytes(running.broker.pid))
        self.redis_used.append(figures["used_memory"])
        self.redis_rss.append(figures["used_memory_rss"])

    def shown(self) -> dict[str, Any]:
        """Return the slope of each curve after the fleet has settled, and its range."""
        first = int(len(self.seconds) * SETTLING)
        curves = {"broker_rss": self.broker_rss, "redis_used": self.redis_used}
        return {"samples": len(self.seconds)} | {
            name: {
                "slope_bytes_per_s": round(slope(self.seconds[first:], values[first:]), 1),
                "least_mib": round(min(values[first:]) / 2**20, 1),
                "most_mib": round(max(values[first:]) / 2**20, 1),
            }
            for name, values in curves.items()
        }


def soak(folder: Path, *, actors: int, seconds: float, seasoned: bool) -> dict[str, object]:
    """Let the fleet work for so long; returns its times, the memory, and what became of tasks.

    Args:
        folder: For the run.
        actors: How many.
        seconds: How long.
        seasoned: They begin as actors that have been there for hours: memory grows until then.
    """
    memory = Memory()
    limits = (f"run.groups_per_batch={GROUPS_PER_BATCH}", f"run.max_policy_lag={MAX_POLICY_LAG}")
    probes = min(PROBES, actors)
    every = ("--seasoned",) if seasoned else ()
    crowd = ("--yields", "--first", str(probes), "--actors", str(actors - probes), *every)
    with ring(folder, *limits) as running, ExitStack() as fleet:
        if actors > probes:
            others = fleet.enter_context(_playing(running, *crowd, "--seconds", FOR_EVER))
            _wait_until_joined(others)
        flags = ("--actors", str(probes), "--seconds", str(seconds), *every)
        process = fleet.enter_context(_playing(running, *flags))
        _wait_until_joined(process)
        episodes = _learn(running, process, memory)
        output, _ = process.communicate()
        if process.returncode != 0:
            raise RuntimeError(f"the fleet ended with {process.returncode}")
        if actors > probes and others.poll() is not None:
            raise RuntimeError(f"most of the fleet ended early, with {others.returncode}")
    figures: dict[str, object] = json.loads(output.splitlines()[-1])
    figures |= {"probes": probes, "actors": actors}
    return figures | {"episodes": episodes, "memory": memory.shown()}


@contextmanager
def _playing(running: Ring, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """Start a process that plays actors; it ends with the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.delivery.fleet", str(running.config), *flags],
        stdout=subprocess.PIPE,
        env=environment(),
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _wait_until_joined(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], JOIN_S)
    if not readable:
        raise RuntimeError(f"actors must join within {JOIN_S:g} s, and some have not")
    if process.stdout.readline().strip() != JOINED:
        raise RuntimeError("the fleet ended before all had joined; its error is above")


def _learn(running: Ring, fleet: subprocess.Popen[str], memory: Memory) -> int:
    """Take batches and look at the memory until the fleet has ended; returns the episodes."""
    episodes, began = 0, time.monotonic()
    next_sample = began
    while fleet.poll() is None:
        episodes += len(running.take() or ())
        now = time.monotonic()
        if now >= next_sample:
            memory.sample(running, now - began)
            next_sample = now + SAMPLE_EVERY_S
        time.sleep(LOOK_EVERY_S)
    return episodes


def slope(seconds: Sequence[float], values: Sequence[float]) -> float:
    """Return the slope of the straight line of least squares."""
    if len(seconds) < 2:
        return 0.0
    return float(np.polyfit(seconds, values, 1)[0])


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(pid)
