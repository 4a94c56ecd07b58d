"""Operations as values: calls of Lua scripts and reads, and the value made of their replies.

An operation is a generator of calls and needs no client, so one definition serves the blocking and
the asyncio store. An operation that works in slices can use a reply before its next call.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, TypeAlias, TypeVar

from buffer.record.episode import PolicyVersion

from .values import (
    ActorSeen,
    BeatVerdict,
    Claim,
    ClaimCounts,
    ClaimedUnit,
    DeadLetter,
    DeadTask,
    EvalCounts,
    LeaseAnswer,
    LeasedTask,
    StaleMask,
    Stats,
    StoredPublication,
)

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Item = TypeVar("Item")

Argument: TypeAlias = "str | bytes | int | float"
Reply: TypeAlias = Any
"""Nested lists of bytes, int and None, as Redis sends them; parsed at once, never passed on."""

SLICE = 128
"""Tasks that one script call moves at most, so that other calls do not wait long."""


@dataclass(frozen=True, slots=True)
class ScriptCall:
    """One call of one script."""

    script: str
    arguments: tuple[Argument, ...]
    records: tuple[bytes, ...] = ()
    """Records that are written in one transaction with the script: the i-th, from 1, is `in:<i>`.

    Lua would copy a record several times, which takes Redis longer than all its other work for an
    episode. So a script moves a record that it accepts, and unlinks the others.
    """


@dataclass(frozen=True, slots=True)
class Fetch:
    """A read of strings without Lua, for the same reason; a missing key gives None."""

    keys: tuple[str, ...]
    """Keys without the run's prefix."""


Steps: TypeAlias = Generator[ScriptCall | Fetch, Reply, T]


@dataclass(frozen=True, slots=True)
class Operation(Generic[T_co]):
    """A named operation on the store, run by `Store.run` or `AsyncStore.run`."""

    name: str
    steps: Callable[[], Steps[T_co]]

    def carry_out(self, ask: Callable[[ScriptCall | Fetch], Reply]) -> T_co:
        """Make the calls one after the other, and return the value of their replies."""
        steps = self.steps()
        reply: Reply = None
        while True:
            try:
                call = steps.send(reply)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            reply = ask(call)


def single(script: str, arguments: Iterable[Argument], parse: Callable[[Reply], T]) -> Operation[T]:
    """Make an operation of one call."""
    call = ScriptCall(script, tuple(arguments))

    def steps() -> Steps[T]:
        return parse((yield call))

    return Operation(script, steps)


def sliced(
    script: str,
    head: Sequence[Argument],
    items: Sequence[Sequence[Argument]],
    parse: Callable[[list[Reply]], T],
    *,
    size: int = SLICE,
) -> Operation[T]:
    """Make an operation that calls a script once per `size` items."""

    def steps() -> Steps[T]:
        replies: list[Reply] = []
        for part in _batches(items, size):
            reply = yield ScriptCall(script, (*head, *(x for item in part for x in item)))
            replies.append(reply)
        return parse(replies)

    return Operation(script, steps)


def repeated(script: str, arguments: Iterable[Argument]) -> Operation[int]:
    """Make an operation that calls a script until nothing is left and adds up its counts."""
    call = ScriptCall(script, tuple(arguments))

    def steps() -> Steps[int]:
        total, more = 0, 1
        while more:
            count, more = yield call
            total += count
        return total

    return Operation(script, steps)


def nothing(_reply: Reply) -> None:
    """Parse a reply without content."""


def _batches(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    remaining = iter(items)
    while part := list(islice(remaining, size)):
        yield part


# --------------------------------------------------------------------------------------------------
# Replies of the Lua scripts to values: one function per shape of reply.


def parse_texts(reply: Reply) -> dict[str, str]:
    """Parse a flat list of fields and values."""
    return {reply[i].decode(): reply[i + 1].decode() for i in range(0, len(reply), 2)}


def parse_verdicts(replies: list[Reply]) -> list[str]:
    """Parse the replies of a script that gives one verdict per item."""
    return [verdict.decode() for reply in replies for verdict in reply]


def parse_lease(reply: Reply) -> LeaseAnswer:
    """Parse the reply of lease.lua."""
    status = reply[0].decode()
    if status != "OK":
        return LeaseAnswer(status, [])
    fence = int(reply[1])
    return LeaseAnswer(
        status,
        [
            LeasedTask(int(task), fence, spec, length, tuple(chunks))
            for task, spec, length, chunks in reply[2:]
        ],
    )


def parse_beats(replies: list[Reply]) -> list[BeatVerdict]:
    """Parse the replies of beat.lua."""
    return [
        BeatVerdict(reply[i].decode(), reply[i + 1])
        for reply in replies
        for i in range(0, len(reply), 2)
    ]


def encode_mask(mask: StaleMask | None) -> str:
    """Write what a batch is sealed with: its mask, or 1 for none."""
    return "1" if mask is None else " ".join(map(str, mask))


def parse_claim(reply: Reply, units: int) -> Claim:
    """Parse the last reply of claim.lua, for a batch of `units`."""
    if reply[0] == b"CLOSED":
        return Claim(sealed=False, complete=False, starts=0, units=[])
    sealed, starts = bool(reply[1]), reply[2]
    mask = StaleMask(*map(int, reply[1].split())) if b" " in reply[1] else None
    held = [ClaimedUnit(int(unit[0]), [int(task) for task in unit[1:]]) for unit in reply[3:]]
    return Claim(sealed, sealed or len(held) >= units, starts, held, mask)


def parse_publication(reply: Reply) -> StoredPublication | None:
    """Parse the hash of the publication."""
    fields = parse_texts(reply)
    if not fields:
        return None
    version = PolicyVersion(int(fields.pop("lineage")), int(fields.pop("step")))
    return StoredPublication(version, fields)


def parse_actors(reply: Reply) -> list[ActorSeen]:
    """Parse the reply of actors.lua."""
    return [
        ActorSeen(name.decode().partition("\n")[0], ms / 1000, parse_texts(flat))
        for name, ms, flat in reply
    ]


def parse_dead_letter(reply: Reply) -> DeadLetter:
    """Parse one line of dead_letters.lua."""
    task, ms, why, attempts, length = reply
    return DeadLetter(int(task), int(ms), why.decode(errors="replace"), attempts, length)


def parse_dead_task(reply: Reply) -> DeadTask | None:
    """Parse the reply of dead_letter.lua."""
    if reply is None:
        return None
    letter, incarnation, spec, record, chunks = reply
    return DeadTask(parse_dead_letter(letter), incarnation.decode(), spec, record, chunks)


def parse_stats(reply: Reply) -> Stats:
    """Parse the reply of stats.lua; a run that is not there has state NONE and zeros."""
    meta = parse_texts(reply[0])
    flat, reasons = reply[1], reply[2]
    counts = {flat[i].decode(): flat[i + 1] for i in range(0, len(flat), 2)}
    wanted_ms = counts.pop("wanted_ms")
    return Stats(
        state=meta.get("state", "NONE"),
        lineage=int(meta.get("lineage", 0)),
        version=int(meta.get("version", 0)),
        committed_step=int(meta.get("committed", 0)),
        vocabulary=int(meta["vocabulary"]) if "vocabulary" in meta else None,
        kept_bytes=int(meta.get("kept_bytes", 0)),
        data_failures=int(meta.get("data_failures", 0)),
        data_failure=meta.get("data_failure", ""),
        hashes={k.removeprefix("hash:"): v for k, v in meta.items() if k.startswith("hash:")},
        dropped={reasons[i].decode(): reasons[i + 1] for i in range(0, len(reasons), 2)},
        claims=tuple(
            ClaimCounts(k, units, bool(sealed), starts) for k, units, sealed, starts in reply[3]
        ),
        eval=EvalCounts(*reply[4]),
        unscored={reply[5][i].decode(): reply[5][i + 1] for i in range(0, len(reply[5]), 2)},
        wanted_s=wanted_ms / 1000,
        **counts,
    )
