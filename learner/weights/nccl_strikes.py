"""Strikes of members of NCCL groups: the members to which a broken broadcast is charged.

Pure, as `epochs.py`, which asks it for the members of the next group. When a member dies, the
collective fails at the other members too, so their reports do not tell which of them broke it.
Members that send no JOIN afterwards were the cause, and only they get a strike. Where all send one,
each of them may have been the cause and gets a strike.

    clean ──NCCL_STRIKES in a row──▶ struck ──AGAIN_AFTER versions had by other ways──▶ on trial
      ▲                                ▲                                                  │
      └──────── confirms over NCCL ────┼──────────────────────────────────────────────────┤
                                       └── breaks again: twice as many versions ──────────┘
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from broker.protocol.weight_messages import JOIN_EVERY_S
from buffer.record.episode import PolicyVersion

NCCL_STRIKES = 2
"""Strikes in a row that count: a single one may be a machine that was busy for a while."""
AGAIN_AFTER = 8
"""Versions of a struck member before NCCL is tried with it again: a trial that fails costs the
whole group a deadline."""
LONGEST_PAUSE = 256
HEARD_WITHIN_S = 1.5 * JOIN_EVERY_S
"""A live member has sent a JOIN within this time."""


@dataclass(slots=True)
class _Record:
    strikes: int = 0
    pause: int = 0
    """Versions that it still has to receive in other ways."""
    version: PolicyVersion | None = None


class NcclStrikes:
    """Counts the strikes of each member.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._records: dict[str, _Record] = {}
        self._suspects: set[str] = set()
        self._unheard: set[str] = set()
        self._broke_at = 0.0

    def on_join(self, actor: str, version: PolicyVersion) -> None:
        """Note that an actor is alive, and the version that it serves."""
        self._unheard.discard(actor)
        record = self._records.setdefault(actor, _Record())
        if record.version is not None and version > record.version:
            record.pause = max(record.pause - 1, 0)
        record.version = version

    def on_confirmed(self, actor: str) -> None:
        """Note that a member has confirmed a version that came over NCCL."""
        self._records[actor].strikes = 0

    def on_broken(self, waited_for: Iterable[str]) -> None:
        """Note that a broadcast broke before these members had confirmed it."""
        self._judge()
        self._suspects = set(waited_for)
        self._unheard = set(self._suspects)
        self._broke_at = self._clock()

    def clean(self, members: Collection[str]) -> tuple[str, ...]:
        """Return the members with which NCCL is used."""
        if self._clock() - self._broke_at >= HEARD_WITHIN_S:
            self._judge()
        return tuple(name for name in members if not self._records[name].pause)

    def forget_all_but(self, live: Collection[str]) -> None:
        """Drop the records of actors that have gone."""
        self._records = {name: record for name, record in self._records.items() if name in live}

    def _judge(self) -> None:
        for name in self._unheard or self._suspects:
            record = self._records.get(name)
            if record is None:  # gone for good
                continue
            record.strikes += 1
            over = record.strikes - NCCL_STRIKES
            if over >= 0:
                record.pause = min(AGAIN_AFTER << min(over, 8), LONGEST_PAUSE)
        self._suspects, self._unheard = set(), set()
