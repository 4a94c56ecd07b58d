"""Table of attacks: `python -m tests.broker.attacks [NAME ...] [--full]`.

Each attack meets a small live ring of its own: a store and a broker as processes, three honest
actors that work, and a learner that takes batches. When it is over the attacker leaves without a
word, as one that was cut off. A row has the store's memory before it and some time after it, how
soon an actor that comes then has its first lease, how many batches were taken meanwhile, which
tasks were lost (dead or dropped) and how many the attacker had ever been leased.

Ends with 1 if a row is beyond its bounds: memory at most 5 % more, a lease within a second, batches
go on, no task died, and no more is lost than was leased to the attacker.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from benchmarks.delivery.records import NEWEST
from broker.protocol.messages import LeaseRequest
from configs.errors import NyalaError
from tests.broker.attacks.kinds import ATTACKS, Attack
from tests.broker.attacks.scene import Scene, scene

SETTLE_S = 4.0
SAMPLES = 10
MOST_MEMORY, MOST_LEASE_S = 1.05, 1.0


@dataclass(frozen=True)
class Row:
    """What came of one attack."""

    name: str
    before_kib: float
    after_kib: float
    lease_s: float
    batches: int
    dead: int
    lost: int
    granted: int

    @property
    def holds(self) -> bool:
        """Whether the ring is as it was."""
        return (
            self.after_kib <= MOST_MEMORY * self.before_kib
            and self.lease_s <= MOST_LEASE_S
            and self.batches > 0
            and self.dead == 0
            and self.lost <= self.granted
        )

    def shown(self) -> str:
        """The row in Markdown."""
        share = self.after_kib / self.before_kib - 1
        return (
            f"| {self.name} | {self.before_kib:.0f} | {self.after_kib:.0f} ({share:+.1%}) "
            f"| {self.lease_s:.2f} | {self.batches} | {self.dead} | {self.lost} of {self.granted} "
            f"| {'yes' if self.holds else '**no**'} |"
        )


async def memory_kib(here: Scene) -> float:
    """The least of some readings: what is there besides what is on its way."""
    readings = []
    for _ in range(SAMPLES):
        readings.append(here.used_memory() / 1024)
        await asyncio.sleep(0.1)
    return min(readings)


async def first_lease_s(here: Scene) -> float:
    """How long an actor that comes now waits for its first lease."""
    began = time.monotonic()
    actor = await here.actor("newcomer")
    while not (await actor.lease(LeaseRequest(1, NEWEST), deadline_s=30)).leases:
        pass
    return time.monotonic() - began


async def suffer(name: str, attack: Attack, after_s: float) -> Row:
    """Attack a ring that is at work."""
    with tempfile.TemporaryDirectory(prefix="nyala-attack-") as folder:
        async with scene(Path(folder)) as here:
            here.pair("evil")
            here.pair("newcomer")
            await asyncio.sleep(SETTLE_S)
            before_kib, stats = await memory_kib(here), here.stats()
            with suppress(NyalaError, TimeoutError):
                async with asyncio.timeout(20):
                    await attack(here)
            await here.cut("evil")
            lease_s, batches = await first_lease_s(here), here.batches
            await asyncio.sleep(after_s)
            after_kib, then = await memory_kib(here), here.stats()
            dropped = sum(then.dropped.values()) - sum(stats.dropped.values())
            dead = then.dead - stats.dead
            return Row(
                name,
                before_kib,
                after_kib,
                lease_s,
                here.batches - batches,
                dead,
                dropped + dead,
                here.granted,
            )


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(ATTACKS))
    parser.add_argument("--full", action="store_true", help="memory a minute after; 20 minutes")
    chosen = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    after_s = 60.0 if chosen.full else 10.0
    head = ("attack", "KiB before", f"{after_s:.0f} s after", "lease, s", "batches", "dead")
    print("|", " | ".join((*head, "lost, of leased", "holds")), "|")
    print("|", " | ".join(["---"] * (len(head) + 2)), "|", flush=True)
    broken = 0
    for name in chosen.names or ATTACKS:
        row = asyncio.run(suffer(name, ATTACKS[name], after_s))
        print(row.shown(), flush=True)
        broken += not row.holds
    return min(broken, 1)


if __name__ == "__main__":
    sys.exit(main())
