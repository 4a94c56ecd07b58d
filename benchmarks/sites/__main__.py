"""Two sites of two actors behind far links: sparse updates, once to each site, and full broadcasts.

`python -m benchmarks.sites [--steps N]`, as root, on Linux. A ring is first watched without limits
on its links; by the time of its steps the rate is chosen at which a whole version takes four of
them. Arms, all in this one run:

    no_link  the ring with `actors.site` and `learner.sparse_weights`, links without limits
    sites    the same ring, the limits set: the two take turns
    full     a ring of its own with the limits set: each actor pulls each version whole

Delay, losses and rate are those of packets (`link.py`); the hub's own count of the bytes that it
has sent to the sites has everything in it: weights, news of them, tasks, leases, repetitions.
Progress goes to stderr; one JSON object comes last. Its `ratios` are all better when larger.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.sites.link import QUEUE_S, Limits
from benchmarks.sites.networks import FarSites
from benchmarks.sites.ring import SETTINGS, SITES, FarRing, Window, keys_in
from benchmarks.support.machine import describe_machine
from benchmarks.support.progress import say_since
from benchmarks.support.workload import LONG_WORDS, Workload, make_model
from configs.logging import configure_logging
from lab.faults.network import obstacle

ROUND_TRIP_S = 0.08
LOSS = 0.001
STEPS_OF_A_VERSION = 4
"""Own steps of the ring in which one whole version crosses a link."""
MODEL = ("learner.init_layers=4", "learner.init_width=320", "learner.warm_start_steps=30")
BATCH = (
    f"run.environment_settings={LONG_WORDS}",
    "run.max_completion_tokens=32",
    "run.max_prompt_tokens=24",
    "run.group_size=8",
    "run.groups_per_batch=96",
)
SETTLE = 2
"""Batches after a change of the links that are in no window."""
LIMIT_S = 90.0
"""Of a window."""
FULL_LIMIT_S = 300.0
"""Of a window of full broadcasts, whose two pulls at once take eight own steps for each version."""


def main() -> None:
    """Run the arms and print what they gave."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=4, help="batches of a window")
    parser.add_argument("--turns", type=int, default=2, help="windows of no_link and sites")
    parser.add_argument("--full-steps", type=int, default=2, help="batches of the arm full")
    chosen = parser.parse_args()
    configure_logging("benchmark", run="sites")
    why_not = obstacle()
    if why_not is not None:
        raise SystemExit(f"two sites need networks of their own: {why_not}")
    machine, say = describe_machine(), say_since(time.monotonic())
    with tempfile.TemporaryDirectory(prefix="nyala-sites-") as folder:
        made = workload(Path(folder))
        say("model made")
        link, near, sites = with_sites(made, chosen.steps, chosen.turns, say=say)
        full = without(made, Limits(**link["limits"]), chosen.full_steps, say=say)
    arms = {
        "link": link,
        "no_link": figures(near),
        "sites": figures(sites),
        "full": figures([full]),
    }
    machine["load_after"] = describe_machine()["load"]
    print(json.dumps({"arms": arms, "ratios": ratios(arms), "machine": machine}))


def workload(folder: Path) -> Workload:
    """Return the settings that all arms share, with their model and keys made."""
    overrides = (*SETTINGS, *MODEL, *BATCH, f"broker.keys={keys_in(folder)}")
    made = Workload("sites", "tiny.yaml", folder, overrides)
    return replace(made, model=make_model(made))


def with_sites(
    made: Workload, steps: int, turns: int, *, say: Callable[[str], None]
) -> tuple[dict[str, Any], list[Window], list[Window]]:
    """Measure the ring's own step, then let both arms take turns in it."""
    sparse = replace(made, overrides=(*made.overrides, "learner.sparse_weights=true"))
    near, far = [], []
    with FarSites(SITES) as networks, FarRing(sparse, networks, is_sited=True) as ring:
        ring.watch(SETTLE, limit_s=LIMIT_S)
        own = ring.watch(steps, limit_s=LIMIT_S)
        size = ring.version_bytes
        limits = Limits(ROUND_TRIP_S / 2, LOSS, size / (STEPS_OF_A_VERSION * own.step_s))
        say(f"own step {own.step_s:.2f} s, version {size} bytes, so {limits.bytes_per_s:.0f} B/s")
        near.append(own)
        for turn in range(turns):
            networks.limit(limits)
            ring.watch(SETTLE, limit_s=LIMIT_S)
            far.append(ring.watch(steps, limit_s=LIMIT_S))
            say(f"sites: {far[-1]}")
            if turn + 1 < turns:
                networks.limit(Limits())
                ring.watch(SETTLE, limit_s=LIMIT_S)
                near.append(ring.watch(steps, limit_s=LIMIT_S))
                say(f"no link: {near[-1]}")
        densities = [line["density"] for line in ring.deliveries() if line["density"] < 1]
    link = {
        "limits": asdict(limits),
        "queue_s": QUEUE_S,
        "version_bytes": size,
        "own_step_s": round(own.step_s, 3),
        "density_median": round(median(densities), 5),
    }
    return link, near, far


def without(made: Workload, limits: Limits, steps: int, *, say: Callable[[str], None]) -> Window:
    """Watch a ring in which each actor pulls each version whole over its site's link."""
    whole = replace(made, name="full")
    with FarSites(SITES) as networks, FarRing(whole, networks, is_sited=False) as ring:
        networks.limit(limits)
        ring.watch(1, limit_s=FULL_LIMIT_S)
        found = ring.watch(steps, limit_s=FULL_LIMIT_S)
        say(f"full: {found}")
    return found


def figures(windows: Sequence[Window]) -> dict[str, Any]:
    """Return the figures of an arm over all its windows."""
    steps, seconds = sum(each.steps for each in windows), sum(each.seconds for each in windows)
    return {
        "batches": steps,
        "step_s": round(seconds / steps, 3),
        "tokens_per_s": round(sum(each.tokens for each in windows) / seconds, 1),
        "tokens_per_s_by_window": [round(each.tokens / each.seconds, 1) for each in windows],
        "uplink_bytes_per_batch": round(sum(each.uplink_bytes for each in windows) / steps),
        "learner_waited": round(sum(each.waited_s for each in windows) / seconds, 3),
    }


def ratios(arms: dict[str, Any]) -> dict[str, float]:
    """Compare the arm `sites` with the others."""
    sites, full, near = arms["sites"], arms["full"], arms["no_link"]
    fewer = full["uplink_bytes_per_batch"] / sites["uplink_bytes_per_batch"]
    return {
        "site_bytes_fewer": round(fewer, 1),
        "site_over_full_tokens_per_s": round(sites["tokens_per_s"] / full["tokens_per_s"], 2),
        "site_over_no_link_tokens_per_s": round(sites["tokens_per_s"] / near["tokens_per_s"], 3),
    }


if __name__ == "__main__":
    main()
