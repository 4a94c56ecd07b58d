"""Load until it breaks: `python -m benchmarks.delivery.load [--full]`.

Heartbeats at growing rates, then growing fleets that lease and submit as fast as they are let,
against one broker and against two over the same Redis: rates, p50 and p99 by lane, what was refused
as `busy`, how many actors the brokers took for silent (`suspect`; all of them live), how soon a
heartbeat is answered at once when the load has gone, and the CPU time of everybody.

Progress goes to stderr; one JSON object comes last. Its `ratios` are better when larger. Fleet,
brokers, Redis and a learner that claims all share this machine: on few cores it is they that give
way, not the protocol.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.delivery.ring import LOOK_EVERY_S, Ring, ring
from benchmarks.support.machine import describe_machine
from benchmarks.support.progress import say_since
from benchmarks.support.workload import environment
from buffer.operations.run import brokers
from console.run.plan import environment_of
from console.run.process import Command, Process
from console.run.process_guard import ProcessGuard
from console.run.redis_server import HOST, free_port
from console.run.run_folder import RunFolder
from lab.actor_fleet import cpu_s

OVERRIDES = (
    "run.groups_per_batch=256",  # so that a fleet of thousands finds work
    "run.max_policy_lag=7",
    "broker.max_actors=8192",
    "broker.max_actors_per_key=8192",
)
LOOK_AT_BROKERS_S = 0.5


@dataclass(frozen=True, slots=True)
class Size:
    """What is asked, and for how long."""

    rates: tuple[int, ...]
    fleets: tuple[int, ...]
    beats_s: float
    episodes_s: float


SHORT = Size(rates=(500, 2000, 8000), fleets=(50, 400, 1600), beats_s=2.0, episodes_s=8.0)
FULL = Size(
    rates=(500, 2000, 8000, 16_000, 32_000),
    fleets=(50, 200, 800, 1600, 3200, 6400),
    beats_s=5.0,
    episodes_s=20.0,
)


def main() -> None:
    """Load one broker, then two, and print what came of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true", help="numbers to quote; ten minutes")
    chosen = parser.parse_args()
    size = FULL if chosen.full else SHORT
    machine, say = describe_machine(), say_since(time.monotonic())
    arms = {name: load(size, count, say) for name, count in (("one", 1), ("two", 2))}
    machine["load_after"] = describe_machine()["load"]
    print(json.dumps({"arms": arms, "ratios": ratios(arms), "machine": machine}))


def load(size: Size, num_brokers: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Raise the load on so many brokers, step by step."""
    with (
        tempfile.TemporaryDirectory(prefix="nyala-load-") as folder,
        ring(Path(folder), *OVERRIDES) as running,
        _more_brokers(running, num_brokers - 1) as more,
    ):
        pids = [running.broker.pid, *(process.pid for process, _ in more)]
        endpoints = [running.settings.broker.endpoint, *(endpoint for _, endpoint in more)]
        beats, episodes = [], []
        for rate in size.rates:
            flags = ("--rate", str(rate), "--seconds", str(size.beats_s))
            beats.append(_ask(running, "beats", endpoints, flags, pids))
            say(f"{num_brokers} brokers, heartbeats: {json.dumps(beats[-1])}")
        for actors in size.fleets:
            flags = ("--actors", str(actors), "--seconds", str(size.episodes_s))
            episodes.append(_ask(running, "episodes", endpoints, flags, pids))
            say(f"{num_brokers} brokers, episodes: {json.dumps(episodes[-1])}")
        return {"beats": beats, "episodes": episodes}


def ratios(arms: dict[str, Any]) -> dict[str, float]:
    """Compare two brokers with one, and overload with the best that there was before it."""

    def best(arm: str, what: str, rate: Callable[[Any], float]) -> float:
        return max(rate(step) for step in arms[arm][what])

    def beats(step: Any) -> float:
        return float(step["per_s"])

    def episodes(step: Any) -> float:
        return float(step["episodes_per_s"])

    return {
        "two_over_one_beats": round(best("two", "beats", beats) / best("one", "beats", beats), 2),
        "two_over_one_episodes": round(
            best("two", "episodes", episodes) / best("one", "episodes", episodes), 2
        ),
        "overload_over_best_episodes": round(
            episodes(arms["one"]["episodes"][-1]) / best("one", "episodes", episodes), 2
        ),
    }


def _ask(
    running: Ring,
    what: str,
    endpoints: list[str],
    flags: tuple[str, ...],
    broker_pids: list[int | None],
) -> dict[str, Any]:
    """Let a fleet ask while the learner takes batches; returns its figures and ours."""
    redis_pid = int(running.client.info("server")["process_id"])
    known = [pid for pid in broker_pids if pid is not None]
    before = sum(map(cpu_s, known)), cpu_s(redis_pid)
    command = [sys.executable, "-m", "benchmarks.delivery.load_fleet", str(running.config), what]
    fleet = subprocess.Popen(
        [*command, *endpoints, *flags], stdout=subprocess.PIPE, env=environment(), text=True
    )
    suspects, look_at = 0, 0.0
    try:
        while fleet.poll() is None:
            running.take()
            if time.monotonic() >= look_at:
                figures = running.store.run(brokers()).values()
                suspects = max(suspects, int(sum(f.get("suspect", 0) for f in figures)))
                look_at = time.monotonic() + LOOK_AT_BROKERS_S
            time.sleep(LOOK_EVERY_S)
        output, _ = fleet.communicate()
    finally:
        fleet.kill()
    if fleet.returncode != 0:
        raise RuntimeError(f"the fleet ended with {fleet.returncode}; the error is above")
    answer: dict[str, Any] = json.loads(output.splitlines()[-1])
    return answer | {
        "suspect": suspects,
        "brokers_cpu_s": round(sum(map(cpu_s, known)) - before[0], 2),
        "redis_cpu_s": round(cpu_s(redis_pid) - before[1], 2),
    }


@contextmanager
def _more_brokers(running: Ring, count: int) -> Iterator[list[tuple[Process, str]]]:
    """Start more brokers over the same Redis; they end with the block."""
    guard = ProcessGuard(grace_s=5.0)
    started: list[tuple[Process, str]] = []
    try:
        for number in range(count):
            endpoint = f"tcp://{HOST}:{free_port(HOST)}"
            name = f"broker-{number + 2}"
            flags = ("--config", str(running.config), "--set", f"broker.endpoint={endpoint}")
            command = Command(
                name,
                "broker",
                (sys.executable, "-m", "broker", *flags),
                RunFolder(running.settings.run.folder).log(name),
                environment_of("broker", running.settings),
            )
            process = Process(command, guard)
            process.start()
            started.append((process, endpoint))
        yield started
    finally:
        for process, _ in started:
            process.kill()
        guard.close()


if __name__ == "__main__":
    main()
