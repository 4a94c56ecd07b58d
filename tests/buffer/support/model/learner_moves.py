"""Learners in a history against the model: as they should, and any call at any moment."""

from __future__ import annotations

from buffer import operations
from buffer.operations.keys import EVAL_BASE
from buffer.operations.values import Claim, NewTask, Rating, StaleMask
from tests.buffer.support.model import batches, recovery
from tests.buffer.support.model.both import Modelled


def create(h: Modelled) -> None:
    """Units, known ones among them, not always in order."""
    first = max(0, h.created - h.rng.randrange(3))
    units = list(range(first, h.created + h.rng.randint(1, 3)))
    h.created = max(h.created, units[-1] + 1)
    h.rng.shuffle(units)
    specs = {u: [f"spec {i}".encode() for i in h.model.members(u)] for u in units}
    tasks = [
        NewTask(i, unit, spec)
        for unit in units
        for i, spec in zip(h.model.members(unit), specs[unit], strict=True)
    ]
    lineage = a_lineage(h)
    h.same(operations.create(lineage, tasks), lambda: recovery.create(h.model, lineage, specs))


def train(h: Modelled) -> None:
    """The learner goes on as it should, from claim to checkpoint; it may stop anywhere."""
    model, rng = h.model, h.rng
    lineage, k = model.lineage, model.version + 1
    answer = claim(h)
    if answer is None or rng.random() < 0.1:
        return
    if not answer.sealed and answer.units and rng.random() < 0.15:
        units = [unit.group_id for unit in answer.units[:2]]
        reason = rng.choice(["stale", "zero_variance"])
        h.same(
            operations.drop(lineage, k, units, reason),
            lambda: batches.drop(model, lineage, k, units, reason),
        )
    elif answer.complete and answer.units:
        reuse(h)
        seal(h)
        if rng.random() < 0.85:
            h.same(operations.advance(lineage, k), lambda: batches.advance(model, lineage, k))
        if rng.random() < 0.5:
            commit(h)


def claim(h: Modelled) -> Claim | None:
    """Some batch, most often the next."""
    model, rng = h.model, h.rng
    lineage, k = a_lineage(h), a_batch(h)
    units, start = model.limits.units_per_batch, rng.random() < 0.3
    held = len(model.claims[k].units) if k in model.claims else 0
    known, in_order = rng.choice([held, held, 0]), rng.random() < 0.3
    return h.same(
        operations.claim(lineage, k, units, start=start, num_read=known, in_order=in_order),
        lambda: batches.claim(
            model, lineage, k, units, start=start, known=known, in_order=in_order
        ),
    )


def seal(h: Modelled) -> None:
    """Freeze a batch, some of its units rated for reuse."""
    model, lineage, k = h.model, a_lineage(h), h.model.version + 1
    units = model.claims[k].units if k in model.claims else {}
    ratings = [
        Rating(unit, h.rng.randint(1, 2), max(0, k - unit % 3), h.rng.choice([0.5, 1.0, float(k)]))
        for unit in units
        if h.rng.random() < 0.7
    ]
    mask = mask_of(lineage, k)
    h.same(
        operations.seal(lineage, k, ratings, mask=mask),
        lambda: batches.seal(model, lineage, k, ratings, mask=mask),
    )


def advance(h: Modelled) -> None:
    """Forward, or back."""
    lineage, k = a_lineage(h), max(0, h.model.version + h.rng.choice([0, -1, 0, -1, 1]))
    if k in h.model.claims and k > h.model.version and not h.model.claims[k].is_sealed:
        return
    h.same(operations.advance(lineage, k), lambda: batches.advance(h.model, lineage, k))


def commit(h: Modelled) -> None:
    """A checkpoint is durable, or the learner is wrong about it."""
    lineage, k = a_lineage(h), max(0, h.model.version + h.rng.choice([0, 0, 0, -1, 1]))
    h.same(operations.commit(lineage, k), lambda: batches.commit(h.model, lineage, k))


def abandon(h: Modelled) -> None:
    """A batch cannot be trained."""
    lineage, k, to_dead = a_lineage(h), a_batch(h), h.rng.random() < 0.5
    h.same(
        operations.abandon(lineage, k, "poison", to_dead_letters=to_dead),
        lambda: batches.abandon(h.model, lineage, k, "poison", to_dead_letters=to_dead),
    )


def drop(h: Modelled) -> None:
    """Units that may be in the batch or not."""
    lineage, k = a_lineage(h), a_batch(h)
    units = (list(h.model.claims[k].units) if k in h.model.claims else [])[:2] or [0]
    h.same(
        operations.drop(lineage, k, units, "stale"),
        lambda: batches.drop(h.model, lineage, k, units, "stale"),
    )


def publish(h: Modelled) -> None:
    """New weights, older ones, or others of the same version."""
    lineage, step = a_lineage(h), max(0, h.model.version + h.rng.choice([0, 0, 0, -1, 1]))
    fields = {"digest": f"weights {lineage} {step} {h.rng.random() < 0.1}", "endpoint": "tcp"}
    h.same(
        operations.publish(lineage, step, fields),
        lambda: batches.publish(h.model, lineage, step, fields),
    )


def write_run_snapshot(h: Modelled) -> None:
    """A run snapshot; there may be nothing in it."""
    lineage, text = a_lineage(h), h.rng.choice([b"", b"batch %d" % h.model.version])
    h.same(
        operations.write_run_snapshot(lineage, text),
        lambda: batches.write_run_snapshot(h.model, lineage, text),
    )


def reuse(h: Modelled) -> None:
    """Draw kept units."""
    model, rng, lineage, k = h.model, h.rng, a_lineage(h), h.model.version + 1
    sampling, units = rng.choice(["newest", "uniform", "prioritised"]), rng.randint(1, 3)
    numbers = [rng.random() for _ in range(units)]
    drawn = h.same(
        operations.reuse(lineage, k, units, sampling=sampling, numbers=numbers),
        lambda: batches.reuse(model, lineage, k, units, sampling=sampling, numbers=numbers),
    )
    if drawn and rng.random() < 0.2:
        gone = [drawn[0].group_id, 10**6]
        h.same(
            operations.forget_reused(lineage, k, gone),
            lambda: batches.forget_reused(model, lineage, k, gone),
        )


def trim(h: Modelled) -> None:
    """Kept units have bounds in number, bytes and age."""
    rng, lineage = h.rng, a_lineage(h)
    total = sum(kept.num_bytes for kept in h.model.kept.values())
    count = len(h.model.kept)
    units, born = rng.choice([count - 1, count, 99]), rng.choice([0, h.model.version])
    num_bytes = rng.choice([total - 1, total, 10**9])
    h.same(
        operations.trim_replay(
            lineage, units=max(units, 0), num_bytes=num_bytes, born=born, memory_share=0.5
        ),
        lambda: batches.trim_replay(
            h.model, lineage, units=max(units, 0), num_bytes=num_bytes, born=born
        ),
    )


def check_replay(h: Modelled) -> None:
    """After a rewind: does the store have every use?"""
    model, lineage, step = h.model, a_lineage(h), h.model.committed_step
    reused: dict[int, list[int]] = {}
    for unit, kept in model.kept.items():
        if kept.batch is not None:
            reused.setdefault(kept.batch, []).append(unit)
    if reused and h.rng.random() < 0.3:
        reused[min(reused)].append(10**6)
    step += h.rng.choice([0, 0, 1])
    h.same(
        operations.check_replay(lineage, step, reused),
        lambda: batches.check_replay(model, lineage, step, dict(sorted(reused.items()))),
    )


def take_over(h: Modelled) -> None:
    """A learner begins, at the step of its checkpoint, or thinks that it does."""
    model, rng = h.model, h.rng
    h.owners += rng.random() < 0.8
    expected = max(0, model.lineage + rng.choice([0, 0, 0, -1]))
    step, owner = rng.choice([model.committed_step, model.version]), f"learner {h.owners}"
    at_least = rng.choice([0, model.lineage + 2])
    h.same(
        operations.begin_lineage(expected, step, owner=owner, at_least=at_least),
        lambda: batches.begin_lineage(model, expected, step, owner=owner, at_least=at_least),
    )


def restore_lineage(h: Modelled) -> None:
    """The store may have lost a take-over."""
    model, rng = h.model, h.rng
    lineage, step = model.lineage + rng.choice([0, 0, 1, -1]), model.version
    owner = rng.choice([model.owner or "x", f"learner {h.owners}"])
    forks = {lineage: step, **model.forks}
    h.same(
        operations.restore_lineage(lineage, step, owner=owner, lineages=forks),
        lambda: batches.restore_lineage(model, lineage, step, owner=owner, lineages=forks),
    )


def evaluate(h: Modelled) -> None:
    """A round of evaluation begins, or grows."""
    model, step = h.model, h.model.version + h.rng.choice([0, 1])
    lineage = model.lineage
    if (found := model.rounds.get((lineage, step))) and not found.is_open:
        return
    ids = [EVAL_BASE + 100 * step + h.rng.randrange(6) for _ in range(4)]
    tasks = [NewTask(i, 0, b"eval %d" % i, step) for i in dict.fromkeys(ids)]
    h.same(operations.create(lineage, tasks), lambda: recovery.create_eval(model, lineage, tasks))


def close_eval(h: Modelled) -> None:
    """A round of evaluation ends."""
    open_steps = [step for of, step in h.model.open_rounds() if of == h.model.lineage]
    if open_steps:
        lineage, step = a_lineage(h), h.rng.choice(open_steps)
        h.same(
            operations.close_eval(lineage, step),
            lambda: recovery.close_eval(h.model, lineage, step),
        )


def recreate(h: Modelled) -> None:
    """The feeder notes a prompt to repeat."""
    lineage, groups = a_lineage(h), {h.rng.randrange(9): h.rng.choice([None, 100])}
    h.same(
        operations.recreate_dropped(lineage, groups),
        lambda: recovery.recreate_dropped(h.model, lineage, groups),
    )


def a_lineage(h: Modelled) -> int:
    """The learner's, now and then another one."""
    return max(0, h.model.lineage + h.rng.choice([0] * 30 + [-1, 1]))


def mask_of(lineage: int, k: int) -> StaleMask | None:
    """Every second batch has one."""
    return StaleMask(lineage, k, 2 * k) if k % 2 else None


def a_batch(h: Modelled) -> int:
    """The next, now and then another one."""
    return max(1, h.model.version + h.rng.choice([1] * 8 + [2, 0, -1]))
