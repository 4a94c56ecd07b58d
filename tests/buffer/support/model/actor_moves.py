"""Actors and brokers in a history against the model: any grant, any offset, any order."""

from __future__ import annotations

from typing import Any

from buffer import operations
from buffer.operations.values import NEWEST, BeatLine, SubmitLine, version_number
from tests.buffer.support.model import leases
from tests.buffer.support.model.both import (
    EVERY_MS,
    LONGEST_MS,
    TIMEOUT_MS,
    TTL_MS,
    Grant,
    Modelled,
)

ACTORS = ("ann", "bob", "cyd")
KEYS = {"ann": "fleet~ann", "bob": "fleet~bob", "cyd": "key of cyd"}
TEACHERS = ("tea", "tom")
REMEMBERED = 60


def lease(h: Modelled) -> None:
    """An actor with weights of some version asks for work."""
    model, rng = h.model, h.rng
    lineage = max(0, model.lineage + rng.choice([0, 0, 0, 0, 0, -1, -2, 1]))
    step = max(0, model.version + rng.choice([0, 0, 0, -1, -2, 1]))
    name, n, version = rng.choice(ACTORS), rng.randint(1, 8), (lineage, step)
    ttl_ms = rng.choice([TTL_MS, TTL_MS, TTL_MS + 1000])
    key = rng.choice(["", KEYS[name]])
    known = model.requests.get((key, name), (0, 0, 0))[0]
    seq = known + 1 if rng.random() < 0.6 else rng.choice([known, known, 0, max(0, known - 1)])
    asked: dict[str, Any] = {"ttl_ms": ttl_ms, "n": n, "version": version, "key": key, "seq": seq}
    asked["begun_only"] = rng.random() < 0.2
    asked["teacher"] = rng.choice(["", "", "", *TEACHERS])
    asked["abandoned"] = rng.choice([(), (), (known,), (max(0, known - 1), known), (known + 1,)])
    answer = h.same(operations.lease(name, **asked), lambda: leases.lease(model, name, **asked))
    if answer is not None:
        h.grants += [Grant(task.task_id, task.fence, name, key) for task in answer.tasks]
        del h.grants[:-REMEMBERED]


def teach(h: Modelled) -> None:
    """All that actors hold is finished; a teacher leases it, scores it, fails or falls silent."""
    model, rng, teacher = h.model, h.rng, h.rng.choice(TEACHERS)
    held = {i: t for i, t in model.tasks.items() if t.state == "L" and t.teacher is None}
    lines = [
        SubmitLine(i, task.fence or 0, f"record of {i}".encode(), task.key or "", teacher=teacher)
        for i, task in list(held.items())[: rng.randint(1, 9)]
    ]
    h.same(operations.submit(lines), lambda: leases.submit(model, lines))
    name, n = rng.choice(ACTORS), rng.randint(1, 8)
    asked: dict[str, Any] = {"ttl_ms": TTL_MS, "n": n, "version": (0, 0), "key": KEYS[name]}
    asked |= {"seq": 0, "abandoned": (), "begun_only": False, "teacher": teacher}
    answer = h.same(operations.lease(name, **asked), lambda: leases.lease(model, name, **asked))
    if answer is None or not answer.tasks:
        return
    granted = [Grant(task.task_id, task.fence, name, KEYS[name]) for task in answer.tasks]
    h.grants += granted
    what = rng.random()
    if what < 0.3:
        fail_rows(h, [(grant.task, grant.fence) for grant in granted], KEYS[name])
    elif what < 0.5:
        scored = [SubmitLine(g.task, g.fence, b"scored %d" % g.task, g.key) for g in granted]
        h.same(operations.submit(scored), lambda: leases.submit(model, scored))


def beat(h: Modelled) -> None:
    """Chunks that fit, overlap or leave a gap; leases that stood still, or were taken away."""
    lines = []
    held = [
        Grant(i, t.fence or 0, "", t.key or "") for i, t in h.model.tasks.items() if t.state == "L"
    ]
    for grant in held[:6] if h.rng.random() < 0.5 else h.some(6):
        length = (task.length or 0) if (task := h.model.tasks.get(grant.task)) else 0
        offset, tokens = max(0, length + h.rng.choice([0, 0, 0, -1, -2, 1])), h.rng.randint(0, 3)
        if h.rng.random() < 0.1:  # all tokens at once
            offset, tokens = 0, length + h.rng.randint(0, 2)
        chunk = f"<{grant.task} {grant.fence} {offset}+{tokens}>".encode()
        chunk = chunk if tokens else b""
        line = BeatLine(grant.task, grant.fence, offset, tokens, chunk, grant.key)
        earlier = h.rng.choice([0, grant.fence - 1, (task.last_fence or 0) if task else 0])
        first = h.rng.choice([grant.fence, grant.fence, grant.fence, max(0, earlier)])
        last = h.rng.choice([grant.fence, grant.fence, first])
        line = line._replace(first_fence=first, last_fence=last)
        lines.append(line._replace(oldest=_oldest(h)))
    timeout_ms, attempts = h.rng.choice([TIMEOUT_MS, TIMEOUT_MS, 0]), h.rng.randint(2, 3)
    limits = {"ttl_ms": TTL_MS, "progress_timeout_ms": timeout_ms, "max_attempts": attempts}
    limits |= {"max_bytes": h.rng.choice([10**6, 10**6, 90, 40])}
    limits |= {"longest_ms": h.rng.choice([0, 0, LONGEST_MS])}
    send_beats(h, lines, limits)


def pad(h: Modelled) -> None:
    """A holder stores much and gives it back; whoever resumes that sends all of it at once."""
    held = {i: task for i, task in h.model.tasks.items() if task.state == "L" and task.fence}
    if not held:
        return
    i = h.rng.choice(list(held))
    task, limits = held[i], {"ttl_ms": TTL_MS, "progress_timeout_ms": 0, "max_attempts": 3}
    limits |= {"longest_ms": 0, "max_bytes": 10**6}
    fence, key, length = task.fence or 0, task.key or "", task.length or 0
    send_beats(h, [BeatLine(i, fence, length, 1, b"x" * h.rng.choice([40, 80]), key)], limits)
    h.same(
        operations.release([(i, fence)], key), lambda: leases.release(h.model, [(i, fence)], key)
    )
    lease(h)
    length, fence, key = task.length or 0, task.fence or 0, task.key or ""
    tokens, size = h.rng.choice([1, 1, 5]), h.rng.choice([58, 91, 120, 130])
    whole = BeatLine(i, fence, 0, length + tokens, b"x" * size, key)
    tail = BeatLine(i, fence, length, tokens, b"x" * size, key)
    send_beats(h, [h.rng.choice([whole, tail])], limits | {"max_bytes": h.rng.choice([90, 60])})


def send_beats(h: Modelled, lines: list[BeatLine], limits: dict[str, int]) -> None:
    """Send a heartbeat."""
    h.same(
        operations.beat(lines=lines, **limits),
        lambda: leases.beat(h.model, lines=lines, **limits),
    )


def undeliverable(h: Modelled) -> None:
    """Chunks are larger than a message."""
    (rows, key), attempts = _rows(h.of_one_key(2)), h.rng.randint(2, 3)
    h.same(
        operations.cut(rows, key, max_attempts=attempts),
        lambda: leases.cut(h.model, rows, key, max_attempts=attempts),
    )


def suspend(h: Modelled) -> None:
    """The failures of a key are too many."""
    key, why = h.rng.choice(["fleet", *KEYS.values()]), f"why {h.rng.randrange(9)}"
    is_brief = h.rng.random() < 0.3
    call = operations.suspend(key, why, is_brief=is_brief)
    h.same(call, lambda: leases.suspend(h.model, key, why, is_brief=is_brief))


def share(h: Modelled) -> None:
    """One key has nothing, and others have it all."""
    key, n = h.rng.choice(["", "fleet~ann", "fleet~nobody", "nobody"]), h.rng.randint(1, 4)
    still_ms = h.rng.choice([0, 0, 100, 1000])
    lineage = max(0, h.model.lineage + h.rng.choice([0, 0, 0, -1, 1]))
    limits = {"still_ms": still_ms, "token_ms": h.rng.choice([0, 0, 50, 1000])}
    call = operations.share(key, lineage, n, **limits)
    h.same(call, lambda: leases.share(h.model, key, lineage, n, **limits))


def shrink(h: Modelled) -> None:
    """Memory is short."""
    num_bytes = h.rng.choice([1, 60, 200])
    h.same(operations.shrink(num_bytes), lambda: leases.shrink(h.model, num_bytes))


def submit(h: Modelled) -> None:
    """Finished episodes."""
    lines = [
        SubmitLine(
            grant.task,
            grant.fence,
            f"record of {grant.task} by {grant.holder}".encode(),
            grant.key,
            _oldest(h),
            h.rng.choice(["", *TEACHERS]),
        )
        for grant in h.some(6)
    ]
    h.same(operations.submit(lines), lambda: leases.submit(h.model, lines))


def submit_unit(h: Modelled) -> None:
    """All that an actor or a teacher holds is finished: units become complete."""
    teacher = h.rng.choice(["", *TEACHERS])
    lines = [
        SubmitLine(
            i,
            task.fence or 0,
            f"record of {i}".encode(),
            task.key or "",
            teacher="" if task.teacher is not None else teacher,
        )
        for i, task in h.model.tasks.items()
        if task.state == "L"
    ][: h.rng.randint(3, 12)]
    h.same(operations.submit(lines), lambda: leases.submit(h.model, lines))


def release(h: Modelled) -> None:
    """Leases are given back."""
    rows, key = _rows(h.of_one_key())
    h.same(operations.release(rows, key), lambda: leases.release(h.model, rows, key))


def fail(h: Modelled) -> None:
    """Failures of both kinds."""
    fail_rows(h, *_rows(h.of_one_key()))


def fail_rows(h: Modelled, pairs: list[tuple[int, int]], key: str) -> None:
    """Failures of these leases."""
    rows = [(*pair, h.rng.choice(["data", "infra"]), f"why {h.rng.randrange(9)}") for pair in pairs]
    limits = {"max_attempts": h.rng.randint(2, 3), "max_data_failures": h.rng.randint(1, 4)}
    h.same(
        operations.fail(key, failures=rows, **limits),
        lambda: leases.fail(h.model, key, failures=rows, **limits),
    )


def reap(h: Modelled) -> None:
    """A broker looks for expired leases."""
    limits = {"max_attempts": h.rng.randint(2, 3), "batch": h.rng.choice([2, 50])}
    h.same(
        operations.reap(every_ms=EVERY_MS, **limits),
        lambda: leases.reap(h.model, every_ms=EVERY_MS, **limits),
    )


def actor_dies(h: Modelled) -> None:
    """Its supervisor reports a death."""
    name, attempts = h.rng.choice(ACTORS), h.rng.randint(2, 3)
    key = h.rng.choice(["", KEYS[name]])
    h.same(
        operations.release_dead_actor(name, key, max_attempts=attempts),
        lambda: leases.release_dead_actor(h.model, name, key, max_attempts=attempts),
    )


def actors_seen(h: Modelled) -> None:
    """Heartbeats bring figures."""
    name, fields = h.rng.choice(ACTORS), {"host": f"h{h.rng.randrange(3)}"}

    def predict() -> None:
        known = h.model.actors.get(name, (0, {}))[1]
        seen = {a: v for a, v in h.model.actors.items() if a != name}
        h.model.actors = seen | {name: (h.model.now_ms, known | fields)}

    h.same(operations.actor_seen({name: fields}), predict)


def _oldest(h: Modelled) -> int:
    """Number of a version of tokens: of this step, or of one before."""
    if h.rng.random() < 0.8:
        return NEWEST
    lineage = max(0, h.model.lineage + h.rng.choice([0, 0, -1]))
    return version_number((lineage, max(0, h.model.version + h.rng.choice([0, -1, -2]))))


def _rows(grants: list[Grant]) -> tuple[list[tuple[int, int]], str]:
    """Tasks and fences of some grants, and the key that sends them."""
    return [(grant.task, grant.fence) for grant in grants], grants[0].key if grants else ""
