"""The cost of delivery: `python -m benchmarks.delivery [--full] [--only ARM] [--soak MINUTES]`.

Every arm carries the same records of 16 KiB from one process to another, in batches of 64:

    raw_zeromq       PUSH to PULL: nothing is acknowledged, encrypted or stored
    redis_pipelines  RPUSH and LPOP in redis-py's pipelines
    streams_ack      XADD, XREADGROUP, XACK, XDEL: at least once, without fences
    streams_behind_broker  the same behind CURVE and a broker that only forwards: the least that
                     any broker costs; it leases, fences, validates and deduplicates nothing
    nyala            actor, CURVE, broker, Redis, claim: leases, fences, validation, exactly one end
    reverb           dm-reverb's trajectory writer, alone and with a sampler

and is judged by its episodes per CPU second of all its processes together, servers included.
`fleet` is a thousand simulated actors with a connection each: p50 and p99 of LEASE, BEAT and
SUBMIT, and the memory of broker and Redis meanwhile.

Progress goes to stderr; one JSON object comes last. Its `ratios` are all better when larger. The
default takes under two minutes; numbers to quote come from `--full`, with nothing else running.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.delivery.arms import ARMS, REVERB_LIMIT_S, measure
from benchmarks.delivery.records import RECORD_BYTES, Records
from benchmarks.delivery.soak import soak
from benchmarks.support.machine import describe_machine
from benchmarks.support.progress import say_since
from benchmarks.support.workload import environment

CHOICES = (*ARMS, "reverb", "fleet")
REVERB_BATCHES = 4  # records that Reverb's arm sends again and again
NO_REVERB = "dm-reverb is not installed; give --reverb-python, an interpreter that has it"


@dataclass(frozen=True, slots=True)
class Size:
    """How long the arms measure."""

    passes: int
    window_s: float
    fleet_s: float


SHORT = Size(passes=1, window_s=4.0, fleet_s=20.0)
FULL = Size(passes=3, window_s=8.0, fleet_s=60.0)
SOAK_MINUTES = 10.0
"""Of the fleet with `--full`."""


def main() -> None:
    """Run the chosen arms and print what they gave."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true", help="numbers to quote; twenty minutes")
    parser.add_argument("--only", action="append", choices=CHOICES, help="may be given again")
    parser.add_argument("--soak", type=float, metavar="MINUTES", help="let the fleet work so long")
    parser.add_argument("--actors", type=int, default=1000, help="of the fleet")
    parser.add_argument("--reverb-python", default=sys.executable, help="an interpreter with it")
    chosen = parser.parse_args()
    size = FULL if chosen.full else SHORT
    minutes = SOAK_MINUTES if chosen.full and chosen.soak is None else chosen.soak
    fleet_s = size.fleet_s if minutes is None else 60 * minutes
    machine = describe_machine()
    say = say_since(time.monotonic())
    names = chosen.only or CHOICES
    arms: dict[str, Any] = carry(names, size, say)
    if "reverb" in names:
        say("reverb")
        arms |= reverb(chosen.reverb_python, size.window_s)
    if "fleet" in names:
        say(f"fleet: {chosen.actors} actors join, then work for {fleet_s:g} s")
        with tempfile.TemporaryDirectory(prefix="nyala-fleet-") as folder:
            arms["fleet"] = soak(
                Path(folder),
                actors=chosen.actors,
                seconds=fleet_s,
                seasoned=minutes is not None,
            )
    machine["load_after"] = describe_machine()["load"]
    print(json.dumps({"arms": arms, "ratios": ratios(arms), "machine": machine}))


def carry(
    names: list[str] | tuple[str, ...], size: Size, say: Callable[[str], None]
) -> dict[str, Any]:
    """Measure the arms that are ours to start, in turns; returns the median pass of each."""
    found: dict[str, list[dict[str, object]]] = {name: [] for name in ARMS if name in names}
    for _ in range(size.passes):
        for name, figures in found.items():
            with (
                tempfile.TemporaryDirectory(prefix="nyala-delivery-") as folder,
                ARMS[name](Path(folder)) as batches,
            ):
                figures.append(measure(batches, size.window_s).shown())
            say(f"{name}: {figures[-1]['episodes_per_cpu_s']} episodes per CPU second")
    return {
        name: _median(figures) | {"passes": [f["episodes_per_cpu_s"] for f in figures]}
        for name, figures in found.items()
    }


def reverb(python: str, window_s: float) -> dict[str, Any]:
    """Measure Reverb in an interpreter that has it; says why where there is none."""
    has_it = subprocess.run([python, "-c", "import reverb"], capture_output=True, check=False)
    if has_it.returncode != 0:
        return {"reverb_writer": {"skipped": NO_REVERB}}
    with tempfile.TemporaryDirectory(prefix="nyala-reverb-") as folder:
        path = Path(folder) / "records"
        batches = islice(Records().batches(), REVERB_BATCHES)
        path.write_bytes(b"".join(record for batch in batches for record in batch))
        script = Path(__file__).with_name("reverb_arm.py")
        flags = [
            "--records",
            str(path),
            "--record-bytes",
            str(RECORD_BYTES),
            "--seconds",
            str(window_s),
        ]
        done = subprocess.run(
            [python, str(script), *flags],
            capture_output=True,
            env=environment() | {"PYTHONPATH": "", "TF_CPP_MIN_LOG_LEVEL": "3"},
            text=True,
            check=True,
            timeout=REVERB_LIMIT_S,
        )
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def ratios(arms: dict[str, Any]) -> dict[str, float | None]:
    """Divide episodes per CPU second; None where a side is missing."""

    def over(other: str, arm: str = "nyala") -> float | None:
        above, below = (arms.get(x, {}).get("episodes_per_cpu_s") for x in (arm, other))
        return round(above / below, 3) if above and below else None

    return {
        "over_streams_ack": over("streams_ack"),
        "bare_broker_over_streams_ack": over("streams_ack", "streams_behind_broker"),
        "over_streams_behind_broker": over("streams_behind_broker"),
        "over_reverb_writer": over("reverb_writer"),
        "over_reverb_write_and_sample": over("reverb_write_and_sample"),
        "over_redis_pipelines": over("redis_pipelines"),
        "over_raw_zeromq": over("raw_zeromq"),
    }


def _median(passes: list[dict[str, object]]) -> dict[str, object]:
    rates = [float(str(figures["episodes_per_cpu_s"])) for figures in passes]
    return dict(passes[rates.index(statistics.median_low(rates))])


if __name__ == "__main__":
    main()
