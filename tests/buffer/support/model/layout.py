"""The keys in which the store must hold what the model holds, and nothing besides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from buffer.operations.keys import EVAL_BASE
from buffer.operations.operation import encode_mask
from tests.buffer.support.model.batches import kept_in_order
from tests.buffer.support.model.state import Conversation, HostOfAgents, Model, Task

Value: TypeAlias = "dict[bytes, bytes] | list[Any] | set[int] | bytes"


def expected(model: Model) -> dict[str, Value]:
    """Every key of the run without its prefix; empty ones are not there."""
    found: dict[str, Any] = _run(model) | _units(model) | _tasks(model) | _rounds(model)
    found |= _replay(model) | _conversations(model)
    return {key: value for key, value in found.items() if value}


def expiring(model: Model) -> set[str]:
    """Keys that go by themselves: of actors, of hosts, and what is left of rounds."""
    found = {f"a:{name}" for name in model.actors}
    found |= {f"l:{key}:{name}" for key, name in model.requests}
    found |= {f"h:{key}:{name}" for (name, key), host in model.hosts.items() if _host(host)}
    for key, round_ in model.rounds.items():
        if not round_.is_open:
            name = f"v:{key[0]}:{key[1]}"
            found |= {name} if round_.results else set()
            found |= {f"{name}:x"} if round_.failed else set()
    return found


def settings_of(model: Model, meta: Mapping[bytes, bytes]) -> set[bytes]:
    """Fields of a run that has just begun which never change."""
    return set(meta) - set(_run(model)["meta"])


def plain(dump: Mapping[bytes, Any], prefix: str, settings: set[bytes]) -> dict[str, Value]:
    """The contents of a store in the form of `expected`, without the run's settings."""
    found: dict[str, Value] = {}
    for name, value in dump.items():
        key = name.decode().removeprefix(f"{prefix}:")
        held = value
        if key in ("known", "committed", "cancelled", "purged") or key.startswith("dropped:"):
            held = {8 * at + bit for at, byte in enumerate(value) for bit in _bits(byte)}
        if key == "meta":
            held = {field: text for field, text in value.items() if field not in settings}
            if held.get(b"kept_bytes") == b"0":
                del held[b"kept_bytes"]
        if held:
            found[key] = held
    return found


def _bits(byte: int) -> list[int]:
    return [bit for bit in range(8) if byte & 0x80 >> bit]


def _run(model: Model) -> dict[str, Any]:
    meta = {
        "state": model.state,
        "lineage": model.lineage,
        "owner": model.owner,
        "version": model.version,
        "committed": model.committed_step,
        "fence": model.fence,
        "gen": model.confirmed_server,
        "seen": model.server,
        "ttl": model.lease_ms,
        "grace_until": model.grace_until_ms,
        "reaped_at": model.reaped_ms,
        "arrivals": model.arrivals or None,
        "news": model.news or None,
        "paused": model.paused,
        "data_failures": model.data_failures or None,
        "data_failure": model.data_failure,
        "kept_bytes": sum(kept.num_bytes for kept in model.kept.values()) or None,
    }
    fates: dict[str, set[int]] = {}
    for i, fate in model.fates.items():
        fates.setdefault(fate, set()).add(i)
    return {
        "meta": _hash(meta),
        "lineages": _hash(model.forks),
        "known": model.known,
        "teachers": _names(model.teachers),
        "reasons": sorted(reason.encode() for reason in model.reasons),
        "again": _hash({k: "" if v is None else v for k, v in model.recreated.items()}),
        "publication": _hash(model.publication),
        "bulletin": {b"text": model.run_snapshot} if model.run_snapshot is not None else {},
        "deaths": _scored(model.deaths),
        "holders": _scored(model.holders),
        "suspended": _hash({k: f"{at} {n} {why}" for k, (at, n, why) in model.suspended.items()}),
        "actors": _scored({name: seen for name, (seen, _) in model.actors.items()}),
        **{f"a:{name}": _hash(fields) for name, (_, fields) in model.actors.items()},
        **{f"l:{key}:{name}": _request(at) for (key, name), at in model.requests.items()},
        **fates,
    }


def _request(last: tuple[int, int, int]) -> dict[bytes, bytes]:
    return _hash(dict(zip(("seq", "fence", "deadline"), last, strict=True)))


def _units(model: Model) -> dict[str, Any]:
    found: dict[str, Any] = {
        "new": _scored({unit: unit for unit in model.new}),
        "open": _names(model.open),
        "buf": _scored(model.buffer),
        "claims": _scored({k: k for k in model.claims}),
        **{f"s:{unit}": specs for unit, specs in model.new.items()},
        **{f"g:{unit}": _names(members) for unit, members in model.open.items()},
    }
    for k, batch in model.claims.items():
        found[f"c:{k}"] = _scored(batch.units)
        ratings = {f"keep:{u}": f"{m} {b} {r:.17g}" for u, (m, b, r) in batch.ratings.items()}
        sealed = encode_mask(batch.mask) if batch.is_sealed else None
        found[f"c:{k}:s"] = _hash({"sealed": sealed, "starts": batch.starts, **ratings})
    return found


def _tasks(model: Model) -> dict[str, Any]:
    live = {i: task for i, task in model.tasks.items() if i < EVAL_BASE}
    done = {i: task for i, task in live.items() if task.state == "D"}
    claimed = {unit for batch in model.claims.values() for unit in batch.units}
    found: dict[str, Any] = {
        "ready": _ready(model, None),
        "lease": _deadlines({i: t for i, t in live.items() if t.teacher is None}),
        "lease:score": _deadlines({i: t for i, t in live.items() if t.teacher is not None}),
        **{f"unscored:{name}": _ready(model, None, name) for name in model.teachers},
        "lease:eval": _deadlines({i: t for i, t in model.tasks.items() if i >= EVAL_BASE}),
        "done": _names(i for i in done if model.unit_of(i) not in claimed),
        "claimed": _names(i for i in done if model.unit_of(i) in claimed),
        "dead": _scored({i: task.died_ms for i, task in live.items() if task.state == "X"}),
    }
    for i, task in model.tasks.items():
        found[f"t:{i}"] = _hash(_fields(task))
        found[f"t:{i}:p"] = task.chunks
        found[f"e:{i}"] = task.record if i < EVAL_BASE else None
    return found


def _fields(task: Task) -> dict[str, object]:
    return {
        "st": task.state,
        "spec": None if task.spec is None else task.spec.decode(),
        "fence": task.fence,
        "inc": task.holder,
        "key": task.key,
        "failed_by": "".join(f"{tag}\n" for tag in task.failed_by) or None,
        "lost_by": "".join(f"{tag}\n" for tag in task.lost_by) or None,
        "len": task.length,
        "bytes": task.num_bytes,
        "given": task.num_bytes_given,
        "from": task.length_given,
        "lastfence": task.last_fence,
        "oldest": None if task.oldest is None else task.oldest[0] * 2**32 + task.oldest[1],
        "progress": task.progress_ms,
        "att": task.attempts,
        "lastlen": task.length_charged,
        "fails": task.failures,
        "losses": task.losses,
        "losses_by": "".join(f"{tag}\n" for tag in task.losses_by) or None,
        "why": task.why,
        "record": None if task.kept_record is None else int(task.kept_record),
        "reconciled": 1 if task.is_reconciled else None,
        "teacher": task.teacher,
        "made": None if task.made is None else f"{task.made[0]} {task.made[1]}",
        "round": None if task.round is None else f"{task.round[0]}:{task.round[1]}",
    }


def _rounds(model: Model) -> dict[str, Any]:
    found: dict[str, Any] = {
        "rounds": _scored({f"{of}:{step}": step for of, step in model.open_rounds()})
    }
    for key, round_ in model.rounds.items():
        name = f"v:{key[0]}:{key[1]}"
        found[name] = {str(i).encode(): record for i, record in round_.results.items()}
        found[f"{name}:r"] = _ready(model, key)
        found[f"{name}:u"] = _names(round_.unfinished)
        found[f"{name}:x"] = _names(round_.failed)
    return found


def _replay(model: Model) -> dict[str, Any]:
    free = {unit: model.kept[unit] for unit in kept_in_order(model)}
    found: dict[str, Any] = {
        "replay": _scored({unit: kept.rank for unit, kept in free.items()}),
        "replay:age": _scored({unit: kept.born for unit, kept in free.items()}),
        "reused": _scored({u: k.batch for u, k in model.kept.items() if k.batch is not None}),
    }
    for unit, kept in model.kept.items():
        fields = {"ids": " ".join(map(str, kept.tasks)), "bytes": kept.num_bytes, "uses": kept.uses}
        fields |= {"most": kept.most, "born": kept.born, "rank": f"{kept.rank:.17g}"}
        found[f"x:{unit}"] = _hash(fields)
        found |= {f"e:{i}": record for i, record in kept.tasks.items()}
    return found


def _conversations(model: Model) -> dict[str, Any]:
    talks = model.conversations
    taken = {i: talk for i, talk in talks.items() if talk.ticket is not None}
    found: dict[str, Any] = {
        "wanted": _scored({i: talks[i].wanted_ms for i in talks.keys() - taken.keys()}),
        "tickets": _scored({i: t.deadline_ms for i, t in taken.items() if t.why is None}),
        "news": _scored({i: talk.news for i, talk in talks.items()}),
        **{f"h:{key}:{name}": _host(host) for (name, key), host in model.hosts.items()},
    }
    for i, talk in talks.items():
        found[f"m:{i}"] = _mailbox(talk)
        found[f"m:{i}:c"] = [b"%d %d\n%s" % call for call in talk.calls]
        replies = talk.replies.items()
        found[f"m:{i}:r"] = [
            (stamp, b"%d\n%s" % (number, text)) for number, (stamp, text) in replies
        ]
    return found


def _host(host: HostOfAgents) -> dict[bytes, bytes]:
    tasks = " ".join(map(str, host.tasks)) if host.ticket is not None else None
    silent, until_ms = host.num_silent, host.rests_until_ms
    return _hash({"ticket": host.ticket, "ids": tasks, "silent": silent, "rests_until": until_ms})


def _mailbox(talk: Conversation) -> dict[bytes, bytes]:
    fields: dict[str, object] = {
        "calls": len(talk.calls),
        "replies": len(talk.replies),
        "bytes": talk.num_bytes,
        "opened": talk.opened_ms,
        "why": talk.why,
        "newest": talk.newest or None,
        "ticket": talk.ticket,
    }
    if talk.ticket is not None:
        fields |= {"host": talk.host, "key": talk.key}
    fields |= {f"size:{n}": len(talk.body(n)) for n in range(1, len(talk.calls) + 1)}
    fields |= {f"said:{number}": stamp for number, (stamp, _) in talk.replies.items()}
    fields |= {"rewards": talk.num_reward_bytes or None}
    rewards = {b"reward:%d" % n: b"%d %s" % reward for n, reward in talk.rewards.items()}
    return _hash(fields) | {b"want": talk.payload} | rewards


def _ready(
    model: Model, round_key: tuple[int, int] | None, teacher: str | None = None
) -> list[tuple[float, bytes]]:
    return _scored({i: model.tasks[i].place for i in model.among_ready(round_key, teacher)})


def _deadlines(tasks: Mapping[int, Task]) -> list[tuple[float, bytes]]:
    return _scored({i: task.deadline_ms for i, task in tasks.items() if task.state == "L"})


def _scored(scores: Mapping[Any, float]) -> list[tuple[float, bytes]]:
    return sorted((score, str(name).encode()) for name, score in scores.items())


def _names(members: Any) -> list[bytes]:
    return sorted(str(member).encode() for member in members)


def _hash(fields: Mapping[Any, object]) -> dict[bytes, bytes]:
    return {str(k).encode(): str(v).encode() for k, v in fields.items() if v is not None}
