"""Weight epochs: membership of process groups, and the deadlines of each phase.

Pure: no socket, no torch, the clock is injected. The publisher feeds it events and reads the phase.

    IDLE ──begin──▶ FORMING ──all ready──▶ SENDING ──all acks──▶ DONE ──begin──▶ FORMING ...
                     │    ▲                   │
        silent at t1 │    └── without them,   │ silent at t2, a fault, a wrong digest
                     │        once more       ▼
                     └─────────────────▶   BROKEN ──begin──▶ FORMING (always a new group)

A group has one backend. NCCL is used where all members have a GPU, without the members with which
its broadcasts keep breaking (`nccl_strikes.py`): these pull meanwhile. Where no member is left, all
are in a gloo group.

FORMING costs one round trip and blocks no member: one that died or stopped since its last JOIN is
found here, in milliseconds, and not inside the collective, where it would hold up all the others.

Invariants: numbers never decrease; a number is reused only while its membership is unchanged and
its last version was DONE; a member's open epoch ends by its ack, or by an ABORT, after which it
pulls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from broker.protocol.weight_messages import SILENT_AFTER_S
from buffer.record.episode import PolicyVersion

from .nccl_strikes import NcclStrikes

READY_SHARE = 0.2
"""Share of `broadcast_join_s` for READY: actors answer in milliseconds, a rendezvous does not."""
MAX_TRIES = 2
"""Formations for one version; then the actors that lack it pull."""
MAX_STRIKES = 3
"""Broken sends over gloo in a row after which an actor only pulls, to spare the others' epochs."""
NO_VERSION = PolicyVersion(-1, -1)
"""The version of an actor that has none yet."""


class EpochPhase(StrEnum):
    """State of the current weight epoch."""

    IDLE = "IDLE"
    FORMING = "FORMING"
    SENDING = "SENDING"
    DONE = "DONE"
    BROKEN = "BROKEN"


@dataclass(frozen=True, slots=True)
class Membership:
    """A frozen list of members. Rank 0 is the publisher, member i has rank i + 1."""

    number: int
    version: PolicyVersion
    fresh: bool
    """True if a new group is to be built."""
    members: tuple[str, ...]
    backend: str = "gloo"
    """`gloo` or `nccl`."""


@dataclass(slots=True)
class _Actor:
    last_join: float
    can_group: bool
    device: str
    strikes: int = 0


class WeightEpochs:
    """Membership by JOIN, and the state machine of one epoch at a time.

    Args:
        join_s: Time for a group to form: READY has a share of it, the rendezvous after SEND all.
        send_s: Time of the broadcast after that.
        clock: Monotonic seconds.
    """

    def __init__(self, *, join_s: float, send_s: float, clock: Callable[[], float]) -> None:
        self.may_nccl = False
        """Whether rank 0 could be in an NCCL group."""
        self._nccl = NcclStrikes(clock)
        self._ready_s = join_s * READY_SHARE
        self._send_s = join_s + send_s
        self._clock = clock
        self._actors: dict[str, _Actor] = {}
        self._number = 0
        self._intact: tuple[str, tuple[str, ...]] | None = None
        """Backend and members of the group that can be used again."""
        self._waiting: set[str] = set()
        self._tries = 0
        self.phase = EpochPhase.IDLE
        self.deadline = 0.0
        self.membership: Membership | None = None

    def on_join(
        self,
        actor: str,
        *,
        can_group: bool,
        device: str = "cpu",
        version: PolicyVersion = NO_VERSION,
    ) -> None:
        """Note that an actor has sent JOIN."""
        self._nccl.on_join(actor, version)
        joined = self._actors.get(actor)
        if joined is None:
            self._actors[actor] = _Actor(self._clock(), can_group, device)
        else:
            joined.last_join, joined.can_group = self._clock(), can_group
            joined.device = device

    def live(self) -> tuple[str, ...]:
        """Return the actors with a recent JOIN, in a fixed order."""
        oldest = self._clock() - SILENT_AFTER_S
        return tuple(sorted(name for name, a in self._actors.items() if a.last_join >= oldest))

    def open_epoch_of(self, actor: str) -> int:
        """Return the epoch that still has to bring its version to this actor; 0 = none."""
        if self.membership is None:
            return 0
        # A member that sent READY is not waited for while the others do, but its epoch is open.
        forming = self.phase is EpochPhase.FORMING and actor in self.membership.members
        return self._number if forming or actor in self._waiting else 0

    def forget_silent(self) -> None:
        """Drop silent actors, between epochs: a list of the dead would grow for ever."""
        live = set(self.live())
        self._actors = {name: actor for name, actor in self._actors.items() if name in live}
        self._nccl.forget_all_but(live)

    def begin_epoch(self, version: PolicyVersion) -> Membership | None:
        """IDLE, DONE, BROKEN -> FORMING. None (and no change) if no actor can be in a group."""
        assert self.phase not in (EpochPhase.FORMING, EpochPhase.SENDING), self.phase
        self._tries = 0
        return self._form(version)

    def ready(self, actor: str, number: int) -> None:
        """Note a READY; the last one moves FORMING -> SENDING."""
        if self._is_open(number, EpochPhase.FORMING):
            self._waiting.discard(actor)
            if not self._waiting:
                self._enter(EpochPhase.SENDING, self._send_s)

    def acked(self, actor: str, number: int) -> None:
        """Note an ack with the right digest; the last one moves SENDING -> DONE."""
        if not self._is_open(number, EpochPhase.SENDING) or actor not in self._waiting:
            return
        self._waiting.discard(actor)
        assert self.membership is not None
        if self.membership.backend == "nccl":
            self._nccl.on_confirmed(actor)
        self._actors[actor].strikes = 0
        if not self._waiting:
            self._intact = (self.membership.backend, self.membership.members)
            self.phase = EpochPhase.DONE

    def broke(self, number: int) -> tuple[str, ...]:
        """Note that the group failed; -> BROKEN. Returns the members still waited for."""
        if not (
            self._is_open(number, EpochPhase.FORMING) or self._is_open(number, EpochPhase.SENDING)
        ):
            return ()
        behind = tuple(sorted(self._waiting))
        if self.phase is EpochPhase.SENDING:
            self._charge_members(behind)
        self._break()
        return behind

    def expire(self) -> tuple[str, ...]:
        """If the deadline has passed: count the silent as gone and -> BROKEN. Returns them.

        They are members again with their next JOIN. `retry` may form the group once more without
        them.
        """
        if (
            self.phase not in (EpochPhase.FORMING, EpochPhase.SENDING)
            or self._clock() < self.deadline
        ):
            return ()
        sending, silent = self.phase is EpochPhase.SENDING, tuple(sorted(self._waiting))
        for name in silent:
            self._actors[name].last_join = float("-inf")
        if sending:
            self._charge_members(silent)
        self._break()
        return silent

    def retry(self) -> Membership | None:
        """BROKEN -> FORMING for the same version.

        None (and no change) if its tries are used up, or no actor can be in a group.
        """
        assert self.phase is EpochPhase.BROKEN and self.membership is not None, self.phase
        return self._form(self.membership.version) if self._tries < MAX_TRIES else None

    def candidates(self) -> tuple[str, ...]:
        """Return the live actors that could be in a group, in a fixed order."""
        return tuple(name for name in self.live() if self._may_group(self._actors[name]))

    def _form(self, version: PolicyVersion) -> Membership | None:
        backend, members = self._group_of(self.candidates())
        if not members:
            return None
        fresh = (backend, members) != self._intact
        self._number += fresh
        self._intact = None
        self._tries += 1
        self.membership = Membership(self._number, version, fresh, members, backend)
        self._enter(EpochPhase.FORMING, self._ready_s)
        return self.membership

    def _group_of(self, candidates: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
        """Return the backend of the next group, and its members."""
        if self.may_nccl and all(self._actors[name].device == "cuda" for name in candidates):
            clean = self._nccl.clean(candidates)
            if clean:
                return "nccl", clean
        return "gloo", candidates

    def _charge_members(self, waited_for: tuple[str, ...]) -> None:
        """Charge a broken group to the members that had not confirmed."""
        assert self.membership is not None
        if self.membership.backend == "nccl":
            self._nccl.on_broken(waited_for)
            return
        for name in waited_for:
            self._actors[name].strikes += 1

    @staticmethod
    def _may_group(actor: _Actor) -> bool:
        return actor.can_group and actor.strikes < MAX_STRIKES

    def _enter(self, phase: EpochPhase, time_s: float) -> None:
        assert self.membership is not None
        self.phase = phase
        self._waiting = set(self.membership.members)
        self.deadline = self._clock() + time_s

    def _break(self) -> None:
        self.phase = EpochPhase.BROKEN
        self._waiting = set()
        self._intact = None

    def _is_open(self, number: int, phase: EpochPhase) -> bool:
        return (
            self.phase is phase and self.membership is not None and self.membership.number == number
        )
