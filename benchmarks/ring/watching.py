"""The cost of watching a run: pages of metrics that are read, and sampled texts, over neither.

In turns, so that what else the machine does meets both sides; each pair gives one ratio. Beside it
the CPU time that the threads of pages, texts and advice have logged for themselves, free of what
else the machine does; none of them is the one that trains. What that one hands over is measured
after the last run.
"""

from __future__ import annotations

import json
import math
import statistics
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.ring.handed_over import handed_over_us
from benchmarks.ring.watched_run import watch
from benchmarks.support.progress import Say
from benchmarks.support.workload import Workload, make_model

SCRAPE_S = 10.0  # of the scrape configuration that comes with us
FIRST = 10  # batches before that are start-up
OVERRIDES = ("actors.engine=torch", "run.eval_episodes=0")
OFF = ("run.samples.every=0", "run.samples.max_mb=0")
ON = tuple(
    f"{table}.metrics_endpoint=http://127.0.0.1:0" for table in ("broker", "learner", "actors")
)
THREADS = ("advice", "pages", "samples")
"""Events at the end of a process, each with the CPU time of its threads."""
STUDENT_95 = dict(
    enumerate((12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262), start=2)
)
"""Two-sided, by the number of rounds."""


def watching(folder: Path, *, rounds: int, batches: int, say: Say) -> dict[str, Any]:
    """Run the demo with the small engine, unwatched and watched, and compare CPU per token."""
    base = Workload("watching", "demo.yaml", folder, OVERRIDES)
    base = replace(base, model=make_model(base))
    found: dict[str, list[float]] = {"unwatched": [], "watched": []}
    scrapes, own = 0, list[Counter[str]]()
    cpu_ms = list[float]()
    for index in range(rounds):
        for name in sorted(found, reverse=bool(index % 2)):
            changes = ON if name == "watched" else OFF
            workload = replace(base, name=f"{name}-{index}", overrides=(*base.overrides, *changes))
            run = workload.settings().run.folder
            with _scraped(run / "metrics") as counted:
                trace = watch(workload, lambda seen: len(seen.metrics) >= batches)
            scrapes += sum(counted)
            if name == "watched":
                cpu_s = trace.cpu_s(FIRST, batches)
                own.append(own_percent(run / "logs", cpu_s=cpu_s))
                cpu_ms.append(1e3 * cpu_s / (batches - FIRST))
            found[name].append(1e6 / trace.tokens_per_cpu_s(FIRST, batches))
            say(f"{workload.name}: {found[name][-1]:.1f} s of CPU per million trained tokens")
    handed_over = handed_over_us(replace(base, name="watched-0").settings(), folder / "handed-over")
    pairs = zip(found["watched"], found["unwatched"], strict=True)
    costs = [100 * (watched / unwatched - 1) for watched, unwatched in pairs]
    spread = statistics.stdev(costs) / math.sqrt(rounds) if rounds > 1 else None
    return {
        "watching": {
            "cpu_s_per_million_tokens": {
                name: [round(value, 1) for value in values] for name, values in found.items()
            },
            "extra_cpu_percent": round(statistics.mean(costs), 2),
            "interval_percent": None if spread is None else round(STUDENT_95[rounds] * spread, 2),
            "own_cpu_percent": {
                name: round(statistics.mean(each[name] for each in own), 3)
                for name in (*THREADS, "all")
            },
            "training_thread_us_per_batch": handed_over,
            "training_thread_percent": percent_of_a_batch(handed_over, cpu_ms),
            "pages_read": scrapes,
        }
    }


def percent_of_a_batch(handed_over: Mapping[str, float], cpu_ms: Sequence[float]) -> float:
    """Return what is handed over in percent of the CPU time of a batch, of all processes.

    Args:
        handed_over: Microseconds for each batch, by what it is.
        cpu_ms: Of a batch, run by run.
    """
    return round(100 * sum(handed_over.values()) / 1e3 / statistics.mean(cpu_ms), 3)


def own_percent(logs: Path, *, cpu_s: float, threads: Sequence[str] = THREADS) -> Counter[str]:
    """Return what the threads that only watch took in a whole life, in percent of some CPU time.

    Args:
        logs: Of a run that has ended.
        cpu_s: Of all its processes; without the start-up, so that the shares are upper bounds.
        threads: Events at the end of a process, each with the CPU time of its threads.
    """
    found = Counter[str]()
    for file in logs.glob("*.log"):
        for line in file.read_text(encoding="utf-8").splitlines():
            if not line.startswith("{"):
                continue
            entry = json.loads(line)
            if entry["event"] in threads and "cpu_s" in entry:
                for name in (entry["event"], "all"):
                    found[name] += 100 * entry["cpu_s"] / cpu_s
    return found


@contextmanager
def _scraped(targets: Path) -> Iterator[list[int]]:
    """Read all pages of a run every `SCRAPE_S`, as Prometheus does; counts them."""
    done, counts = threading.Event(), list[int]()

    def scrape() -> None:
        while not done.wait(SCRAPE_S):
            for file in list(targets.glob("*.json")):
                try:
                    (target,) = json.loads(file.read_text(encoding="utf-8"))
                    url = f"http://{target['targets'][0]}/metrics"
                    with urllib.request.urlopen(url, timeout=SCRAPE_S) as page:
                        counts.append(len(page.read()) > 0)
                except OSError:
                    continue  # a process that has just ended

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield counts
    finally:
        done.set()
        thread.join()
