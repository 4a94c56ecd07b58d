"""Replies of the Lua scripts to values: one function per shape of reply."""

from __future__ import annotations

from buffer.record.episode import PolicyVersion

from .operation import Reply
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
    Publication,
    Stats,
)


def parse_texts(reply: Reply) -> dict[str, str]:
    """A flat list of fields and values."""
    return {reply[i].decode(): reply[i + 1].decode() for i in range(0, len(reply), 2)}


def parse_verdicts(replies: list[Reply]) -> list[str]:
    """The answers of a script that gives one verdict per item."""
    return [verdict.decode() for reply in replies for verdict in reply]


def parse_lease(reply: Reply) -> LeaseAnswer:
    """The answer of lease.lua."""
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
    """The answers of beat.lua."""
    return [
        BeatVerdict(reply[i].decode(), reply[i + 1])
        for reply in replies
        for i in range(0, len(reply), 2)
    ]


def parse_claim(reply: Reply, units: int) -> Claim:
    """The last answer of claim.lua, for a batch of `units`."""
    if reply[0] == b"CLOSED":
        return Claim(sealed=False, complete=False, starts=0, units=[])
    sealed, starts = bool(reply[1]), reply[2]
    held = [ClaimedUnit(int(unit[0]), [int(task) for task in unit[1:]]) for unit in reply[3:]]
    return Claim(sealed, sealed or len(held) >= units, starts, held)


def parse_publication(reply: Reply) -> Publication | None:
    """The publication's hash."""
    fields = parse_texts(reply)
    if not fields:
        return None
    version = PolicyVersion(int(fields.pop("lineage")), int(fields.pop("step")))
    return Publication(version, fields)


def parse_actors(reply: Reply) -> list[ActorSeen]:
    """The answer of actors.lua."""
    return [
        ActorSeen(name.decode().partition("\n")[0], ms / 1000, parse_texts(flat))
        for name, ms, flat in reply
    ]


def parse_dead_letter(reply: Reply) -> DeadLetter:
    """One line of dead_letters.lua."""
    task, ms, why, attempts, length = reply
    return DeadLetter(int(task), int(ms), why.decode(errors="replace"), attempts, length)


def parse_dead_task(reply: Reply) -> DeadTask | None:
    """The answer of dead_letter.lua."""
    if reply is None:
        return None
    letter, incarnation, spec, record, chunks = reply
    return DeadTask(parse_dead_letter(letter), incarnation.decode(), spec, record, chunks)


def parse_stats(reply: Reply) -> Stats:
    """The answer of stats.lua; a run that is not there has state NONE and zeros."""
    meta = parse_texts(reply[0])
    flat, reasons = reply[1], reply[2]
    counts = {flat[i].decode(): flat[i + 1] for i in range(0, len(flat), 2)}
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
        **counts,
    )
