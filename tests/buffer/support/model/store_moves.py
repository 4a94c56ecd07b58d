"""The clock, lost writes, operators and readers in a history against the model."""

from __future__ import annotations

from buffer import operations
from buffer.operations.keys import EVAL_BASE
from tests.buffer.support.model import batches, leases, recovery, views
from tests.buffer.support.model.actor_moves import beat, reap
from tests.buffer.support.model.both import EVERY_MS, LONGEST_MS, TIMEOUT_MS, TTL_MS, Modelled
from tests.buffer.support.model.learner_moves import a_batch, a_lineage, mask_of, take_over


def pass_time(h: Modelled) -> None:
    """A while passes, or the clock stands just before, at, or after an instant that matters."""
    model, rng = h.model, h.rng
    if rng.random() < 0.5:
        h.set_clock(model.now_us + rng.choice([300, 40_000, 500_000, 1_500_000]))
        return
    instants = [task.deadline_ms for task in model.tasks.values() if task.state == "L"]
    instants += [(task.progress_ms or 0) + TIMEOUT_MS for task in model.tasks.values()]
    instants += [(task.fence or 0) // 1000 + LONGEST_MS for task in model.tasks.values()]
    talks = model.conversations.values()
    instants += [talk.deadline_ms for talk in talks if talk.ticket is not None]
    turns = [talk.opened_ms for talk in talks if talk.opened_ms is not None]
    instants += [turn + limit for turn in turns for limit in (TIMEOUT_MS, LONGEST_MS)]
    instants += [model.grace_until_ms or 0, (model.grace_until_ms or 0) + TIMEOUT_MS]
    instants += [(model.reaped_ms or 0) + gap for gap in (TTL_MS // 2, 3 * EVERY_MS)]
    ahead = sorted(at for at in instants if at >= model.now_ms)
    if ahead:
        at_ms = ahead[0] if rng.random() < 0.5 else rng.choice(ahead)
        if rng.random() < 0.7:
            _reap_until(h, at_ms)
        h.set_clock((at_ms + rng.choice([-1, 0, 0, 1])) * 1000)
        rng.choice([reap, reap, beat])(h)  # those who look at the clock, while it stands there


def _reap_until(h: Modelled, at_ms: int) -> None:
    """As brokers do: look for expired leases every second."""
    while 0 < at_ms - h.model.now_ms - EVERY_MS < 30_000:
        h.set_clock(h.model.now_us + 1000 * EVERY_MS)
        reap(h)


def jump(h: Modelled) -> None:
    """The clock is set forward or back."""
    h.set_clock(h.model.now_us + h.rng.choice([-30, -5, -1, 20, 60]) * 10**6)


def requeue(h: Modelled) -> None:
    """An operator tries dead letters again."""
    ids = some_dead(h)
    h.same(operations.requeue_dead(ids), lambda: recovery.requeue_dead(h.model, ids))


def purge(h: Modelled) -> None:
    """An operator deletes a dead letter."""
    ids = some_dead(h)[:1]
    h.same(operations.purge_dead(ids), lambda: recovery.purge_dead(h.model, ids))


def end(h: Modelled) -> None:
    """The run is ended; most often another learner goes on with it."""
    lineage = a_lineage(h)
    h.same(operations.cancel(lineage), lambda: recovery.cancel(h.model, lineage))
    h.compare()  # before that learner removes what is left of this one
    if h.rng.random() < 0.9:
        take_over(h)


def resume(h: Modelled) -> None:
    """A learner does what it takes to have the run go on."""
    model, h.owners = h.model, h.owners + 1
    expected, owner, step = model.lineage, f"learner {h.owners}", model.version
    h.same(
        operations.begin_lineage(expected, step, owner=owner),
        lambda: batches.begin_lineage(model, expected, step, owner=owner, at_least=0),
    )
    lineage, server = model.lineage, model.server
    h.same(
        operations.recovered(lineage, server), lambda: recovery.recovered(model, lineage, server)
    )


def reopen(h: Modelled) -> None:
    """An operator has leases granted again."""
    h.same(operations.resume(), lambda: leases.resume(h.model))


def save(h: Modelled) -> None:
    """The store's disk has this moment."""
    h.saved = h.save()


def lose_writes(h: Modelled) -> None:
    """Another server answers; often it has lost its last writes."""
    if h.rng.random() < 0.6:
        h.rewind(h.saved)
    server = f"{h.rng.getrandbits(160):040x}"
    h.same(operations.confirm(server), lambda: recovery.confirm(h.model, server))
    if h.rng.random() < 0.8:
        recover(h)


def recover(h: Modelled) -> None:
    """The learner restores what it trained: any units, wherever they are."""
    model, rng, lineage = h.model, h.rng, a_lineage(h)
    units = list(range(h.created)) or [0]
    durable = rng.sample(units, min(len(units), rng.randint(0, 3)))
    if durable:
        h.same(
            operations.restore_committed(lineage, durable),
            lambda: recovery.restore_committed(model, lineage, durable),
        )
    held = [unit for batch in model.claims.values() for unit in batch.in_order()]
    since = rng.sample(units, min(len(units), rng.randint(0, 3))) if rng.random() < 0.5 else held
    k, sealed = a_batch(h), rng.random() < 0.8
    mask = mask_of(lineage, k)
    h.same(
        operations.reconcile(lineage, k, since[:3], sealed=sealed, mask=mask),
        lambda: recovery.reconcile(model, lineage, k, since[:3], sealed=sealed, mask=mask),
    )
    server = rng.choice([model.server] * 4 + ["0" * 40])
    h.same(
        operations.recovered(lineage, server),
        lambda: recovery.recovered(model, lineage, server),
    )


def look(h: Modelled) -> None:
    """Everybody who only reads."""
    model, rng = h.model, h.rng
    h.same(operations.stats(), lambda: views.stats(model))
    h.same(operations.audit(), list)
    ids = [*rng.sample(range(3 * h.created + 3), 2), *list(model.tasks)[-3:]]
    h.same(operations.inspect(ids), lambda: views.inspect(model, ids))
    letters = views.dead_letters(model)
    h.same(operations.dead_letters(1, 2), lambda: letters[1:3])
    h.same(operations.dead_letter(ids[0]), lambda: views.dead_letter(model, ids[0]))
    if letters:
        first = letters[0].task_id
        h.same(operations.dead_letter(first), lambda: views.dead_letter(model, first))
    h.same(operations.usage(), lambda: views.usage(model))
    h.same(operations.peek(2), lambda: views.peek(model, 2))
    h.same(operations.claim_bytes(k := a_batch(h)), lambda: views.claim_bytes(model, k))
    trained = [i for i in ids if i < EVAL_BASE]
    h.same(operations.records(trained), lambda: views.records(model, trained))
    h.same(operations.recreations(), lambda: model.recreated)
    h.same(operations.lineages(), lambda: model.forks)
    h.same(operations.read_run_snapshot(), lambda: model.run_snapshot)
    key = rng.choice(list(model.rounds) or [(0, 0)])
    asked = [i for i in model.tasks if i >= EVAL_BASE]
    asked = [*rng.sample(asked, min(len(asked), 3)), EVAL_BASE + 2**40]
    h.same(operations.eval_round(*key, asked), lambda: views.eval_round(model, key, asked))


def some_dead(h: Modelled) -> list[int]:
    """Dead letters, and a task that is none."""
    dead = [i for i, task in h.model.tasks.items() if task.state == "X"]
    picked = h.rng.sample(dead, min(len(dead), h.rng.randint(1, 2)))
    return picked or [h.rng.randrange(3 * h.created + 1)]
