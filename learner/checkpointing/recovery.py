"""Putting a store right that lost writes: restarted, rewound, failed over, or wiped.

    CONFIRM -> lineage -> RECONCILE, COMMIT -> CREATE -> rounds, publication -> RECOVERED

The store comes back older than the learner: it may know batches as claimed, ready or not at all
that weights already contain. So the learner re-asserts what it trained, from its ledger, and
creates again what the store forgot besides. Every step may be repeated; leasing and claiming stay
closed until the last, and actors find out by their next message what became of their leases.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import structlog

from buffer import operations
from buffer.operations.operation import Operation
from configs.hashes import run_hashes, settings_hash
from configs.settings import RunSettings, Settings
from learner.data.curriculum import training_tasks
from learner.data.evaluation import is_due, round_tasks
from learner.data.ledger import Ledger

log = structlog.get_logger()
T = TypeVar("T")


class RunsOperations(Protocol):
    """A store's client, patient or not."""

    def run(self, operation: Operation[T]) -> T:
        """Carry an operation out."""
        ...


def recover(store: RunsOperations, run_id: str, *, settings: Settings, ledger: Ledger) -> None:
    """Make the store agree with the ledger, then let actors and learner go on.

    Args:
        store: Works with this life of the server only.
        run_id: Of that life.
        settings: Of the run.
        ledger: What this learner knows.

    Raises:
        LostLineage: Another learner began this lineage, or a later one.
        StoreError: The store refused, or is away again.
    """
    register_run(settings, store)
    store.run(operations.confirm(run_id))
    was_lost = store.run(
        operations.restore_lineage(
            ledger.lineage, ledger.step, owner=ledger.owner, lineages=ledger.lineages
        )
    )
    reused = {k: ledger.reused.get(k, ()) for k in ledger.batches}
    unkept = store.run(operations.check_replay(ledger.lineage, ledger.checkpoint_step, reused))
    store.run(operations.ask_again(ledger.lineage, ledger.asked_again))
    forgotten = _reassert_batches(store, settings.run, ledger)
    created = _create_again(store, settings.run, ledger)
    _reopen_rounds(store, settings.run, ledger)
    if ledger.publication is not None:
        publish_pointer(store, ledger)
    store.run(operations.recovered(ledger.lineage, run_id))
    log.info(
        "recovered",
        lineage_was_lost=was_lost,
        committed_groups_forgotten=forgotten,
        kept_groups_forgotten=unkept,
        tasks_created_again=created,
        batches_reconciled=sorted(ledger.batches),
    )


def register_run(settings: Settings, store: RunsOperations) -> None:
    """Enter the run into the store, or check that the one there has the same settings."""
    run, buffer = settings.run, settings.buffer
    store.run(
        operations.begin_run(
            settings_hash(settings.run),
            run_hashes(settings.run),
            units_per_batch=run.groups_per_batch,
            max_policy_lag=run.max_policy_lag,
            margin=buffer.margin,
            group_size=run.group_size,
            min_group_size=min(buffer.min_group_size, run.group_size),
        )
    )


def publish_pointer(store: RunsOperations, ledger: Ledger) -> None:
    """Say in the store where the newest weights are."""
    publication = ledger.publication
    assert publication is not None
    fields = {
        "digest": publication.digest,
        "endpoint": publication.endpoint,
        "public_key": publication.public_key,
    }
    store.run(operations.publish(*publication.version, fields))


def _reassert_batches(store: RunsOperations, run: RunSettings, ledger: Ledger) -> int:
    """Bring claims and commits to where training is; returns the committed groups it had lost."""
    lineage = ledger.lineage
    committed = _groups_in(store.run(operations.committed_tasks()), run.group_size)
    forgotten = [g for g in sorted(ledger.checkpointed) if g >= len(committed) or not committed[g]]
    if forgotten:
        store.run(operations.restore_committed(lineage, forgotten))
    # What an old claim of a committed batch holds besides was not trained: back to the buffer.
    for claim in store.run(operations.stats()).claims:
        if claim.k <= ledger.checkpoint_step:
            store.run(operations.reconcile(lineage, claim.k, ()))
    for k, groups in sorted(ledger.batches.items()):
        store.run(operations.reconcile(lineage, k, groups))
    store.run(operations.advance(lineage, ledger.step))
    store.run(operations.commit(lineage, ledger.checkpoint_step))
    return len(forgotten)


def _create_again(store: RunsOperations, run: RunSettings, ledger: Ledger) -> int:
    """Create the groups that the store knows nothing of any more; returns the tasks."""
    known = known_groups(store, run)
    missing = [g for g in range(ledger.reach) if g >= len(known) or not known[g]]
    if not missing:
        return 0
    tasks = training_tasks(run, missing, ledger.second_tries)
    return store.run(operations.create(ledger.lineage, tasks))


def _reopen_rounds(store: RunsOperations, run: RunSettings, ledger: Ledger) -> None:
    """Create what is missing of open evaluation rounds, and end those that have ended."""
    for step in range(ledger.step + 1):
        if step in ledger.open_rounds:
            tasks = round_tasks(run, ledger.lineage, step)
            store.run(operations.create(ledger.lineage, tasks))
        elif is_due(run, step):
            store.run(operations.close_eval(ledger.lineage, step))


def known_groups(store: RunsOperations, run: RunSettings) -> npt.NDArray[np.bool_]:
    """Read which groups the store knows. Shape [groups up to the last that it knows, at least]."""
    return _groups_in(store.run(operations.known_tasks()), run.group_size)


def _groups_in(bits: bytes, group_size: int) -> npt.NDArray[np.bool_]:
    """Which groups have a member in a bitmap of tasks. Shape [groups]."""
    tasks = np.unpackbits(np.frombuffer(bits, dtype=np.uint8))
    padded = np.pad(tasks, (0, -len(tasks) % group_size))
    return np.asarray(padded.reshape(-1, group_size).any(axis=1))
