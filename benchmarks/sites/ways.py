"""A version to four actors of one site over a slow link: by relays, and by pulls of each.

`python -m benchmarks.sites.ways`, as root, on Linux. The link has 10 Mbit/s and a round trip of 80
ms (`link.py`). Arms, which take turns, each with a publisher and four receivers without engines of
its own:

    relays   actors of a site (`actors.site`): one fetches, the others have it from each other
    pulls    each actor pulls from the publisher

Versions travel whole, and in a second series as sparse updates. Seconds are those from the seal
until all four have swapped, bytes all that the learner's side has sent over the link, with headers
and repetitions. One JSON object comes last.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from benchmarks.sites.link import Limits
from benchmarks.sites.networks import HUB, FarSites
from benchmarks.support.machine import describe_machine
from benchmarks.support.progress import say_since
from benchmarks.weights.ring import WeightRing
from configs.logging import configure_logging
from lab.faults.network import enter, obstacle

ARMS = ("relays", "pulls")
LINK = Limits(delay_s=0.04, bytes_per_s=10e6 / 8)
ACTORS = 4
WEIGHTS = 8 * 2**20
"""Of the model, in bfloat16."""
NUM_TENSORS = 50
CHANGED = 0.03
"""Share of the weights that a sparse update changes."""
QUIET_S, QUIET_BYTES_PER_S, DRAIN_S = 2.0, 25_000, 300.0


def main() -> None:
    """Run the arms by turns and print what they gave."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=4, help="versions of each arm, whole")
    parser.add_argument("--sparse-rounds", type=int, default=8, help="sparse updates of each arm")
    chosen = parser.parse_args()
    configure_logging("benchmark", run="ways")
    why_not = obstacle()
    if why_not is not None:
        raise SystemExit(f"a site needs a network of its own: {why_not}")
    machine, say = describe_machine(), say_since(time.monotonic())
    with FarSites(1) as far:
        enter(far.hub)
        found = {
            kind: series(far, rounds, is_sparse=kind == "sparse", say=say)
            for kind, rounds in (("whole", chosen.rounds), ("sparse", chosen.sparse_rounds))
            if rounds
        }
    machine["load_after"] = describe_machine()["load"]
    print(json.dumps({"arms": found, "version_bytes": 2 * WEIGHTS, "machine": machine}))


def series(
    far: FarSites,
    rounds: int,
    *,
    is_sparse: bool,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Let all arms take turns with versions of one kind; returns their figures."""
    seconds: dict[str, list[float]] = {}
    sent: dict[str, list[int]] = {}
    with ExitStack() as stack:
        far.limit(Limits())
        rings = {arm: stack.enter_context(_ring(arm, far, is_sparse=is_sparse)) for arm in ARMS}
        for arm, ring in rings.items():
            ring.pull()  # until now not all were there to be peers
            say(f"{arm} is there")
        far.limit(LINK)
        for _ in range(rounds):
            for arm, ring in rings.items():
                before = far.sent_bytes()
                seconds.setdefault(arm, []).append(round(ring.pull(), 2))
                _drain(far)  # of what comes too late, too
                sent.setdefault(arm, []).append(far.sent_bytes() - before)
                say(f"{arm}: {seconds[arm][-1]} s, {sent[arm][-1]} bytes")
    return {
        arm: {
            "seconds": median(seconds[arm]),
            "link_bytes": round(median(sent[arm])),
            "seconds_by_round": seconds[arm],
            "link_bytes_by_round": sent[arm],
        }
        for arm in rings
    }


def _drain(far: FarSites) -> None:
    """Wait until nothing but signs of life crosses the link."""
    deadline = time.monotonic() + DRAIN_S
    while time.monotonic() < deadline:
        before = far.sent_bytes()
        time.sleep(QUIET_S)
        if far.sent_bytes() - before < QUIET_S * QUIET_BYTES_PER_S:
            return


@contextmanager
def _ring(arm: str, far: FarSites, *, is_sparse: bool) -> Iterator[WeightRing]:
    named: dict[str, Any] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nyala-ways-")))
        if arm == "relays":
            named = {"site": "far", "share_endpoint": f"tcp://{far.address(0)}:0"}
        ring = WeightRing(
            folder,
            _model(),
            receivers=ACTORS,
            network=far.sites[0],
            dtype="bfloat16",
            train=_change_some if is_sparse else _change_all,
            broadcast=False,
            publisher_endpoint=f"tcp://{HUB}:0",
            sparse_weights=is_sparse,
            **named,
        )
        stack.callback(ring.close)
        yield ring


def _model() -> nn.Module:
    count = WEIGHTS // NUM_TENSORS
    return nn.ParameterList(torch.randn(count).bfloat16().float() for _ in range(NUM_TENSORS))


def _change_all(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.mul_(1.1)


def _change_some(model: nn.Module) -> None:
    for parameter in model.parameters():
        chosen = torch.rand_like(parameter) < CHANGED
        parameter.mul_(torch.where(chosen, 1 + 2**-7, 1.0))


if __name__ == "__main__":
    main()
