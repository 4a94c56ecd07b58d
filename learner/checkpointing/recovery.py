"""Recovery of a store that lost writes: restarted, rewound, failed over, or wiped.

    CONFIRM -> lineage -> RECONCILE, COMMIT -> CREATE -> rounds, publication -> RECOVERED

Rank 0 does all of it, at its start (`resume.py`) or in the thread that finds the store rewound
(`retrying_store.py`); words in capitals are operations of the store.

The store comes back older than the learner: batches that weights already contain may be claimed,
ready or missing there. So the learner asserts what it trained, from the facts of its ledger, and
creates again what else is missing. Every step may be repeated; leasing and claiming stay closed
until the last, and the next reply to an actor lists the leases that it lost.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import structlog

from broker.protocol.messages import Publication
from buffer import operations
from buffer.operations.operation import Operation
from configs.hashes import run_hashes, settings_hash
from configs.settings import BufferSettings, RunSettings
from configs.tables.run import UNIFORM
from learner.data.curriculum import training_tasks
from learner.data.evaluation import is_due, round_tasks
from learner.data.ledger import LedgerSnapshot

log = structlog.get_logger()
T = TypeVar("T")


class RunsOperations(Protocol):
    """A client of the store, with or without retries."""

    def run(self, operation: Operation[T]) -> T:
        """Run an operation in the store."""
        ...


def recover(
    store: RunsOperations,
    run_id: str,
    *,
    run: RunSettings,
    buffer: BufferSettings,
    facts: LedgerSnapshot,
) -> None:
    """Make the store agree with the facts, then open leasing and claiming again.

    May be called again after an error: no step does harm when it is repeated.

    Args:
        store: Store that trusts this server process only.
        run_id: Id of that process.
        run: Settings of the run.
        buffer: Settings that the store is registered with.
        facts: Facts of this learner's ledger.

    Raises:
        LostLineage: Another learner began this lineage, or a later one.
        SettingsError: As `register_run` raises it.
        StoreError: The store refused, or is away again.
    """
    register_run(store, run, buffer, vocabulary=facts.vocabulary)
    store.run(operations.confirm(run_id))
    was_lost = store.run(
        operations.restore_lineage(
            facts.lineage, facts.step, owner=facts.owner, lineages=facts.lineages
        )
    )
    reused = {k: facts.reused.get(k, ()) for k in facts.batches}
    unkept = store.run(operations.check_replay(facts.lineage, facts.checkpoint_step, reused))
    store.run(operations.recreate_dropped(facts.lineage, facts.asked_again))
    forgotten = _reassert_batches(store, run, facts)
    created = _create_again(store, run, facts)
    _reopen_rounds(store, run, facts)
    if facts.publication is not None:
        publish_pointer(store, facts.publication)
    store.run(operations.recovered(facts.lineage, run_id))
    log.info(
        "recovered",
        lineage_was_lost=was_lost,
        committed_groups_forgotten=forgotten,
        kept_groups_forgotten=unkept,
        tasks_created_again=created,
        batches_reconciled=sorted(facts.batches),
    )


def register_run(
    store: RunsOperations,
    run: RunSettings,
    buffer: BufferSettings,
    *,
    vocabulary: int | None = None,
) -> None:
    """Register the run in the store, or check that the one there has the same settings.

    Args:
        store: Store of the run.
        run: Settings of the run.
        buffer: Settings of admission.
        vocabulary: Number of token ids of the model; brokers refuse larger ids.

    Raises:
        SettingsError: The run is there with other settings, or a file that is hashed is missing.
        StoreError: The store refused, or is away.
    """
    store.run(
        operations.begin_run(
            settings_hash(run),
            run_hashes(run),
            units_per_batch=run.groups_per_batch,
            max_policy_lag=run.max_policy_lag,
            margin=buffer.margin,
            group_size=run.group_size,
            min_group_size=min(buffer.min_group_size, run.group_size),
            vocabulary=vocabulary,
        )
    )


def publish_pointer(store: RunsOperations, publication: Publication) -> None:
    """Put the pointer to the newest weights into the store, in place of the one before."""
    fields = {
        "digest": publication.digest,
        "endpoint": publication.endpoint,
        "public_key": publication.public_key,
    }
    store.run(operations.publish(*publication.version, fields))


def _reassert_batches(store: RunsOperations, run: RunSettings, facts: LedgerSnapshot) -> int:
    """Bring claims and commits up to the facts; return the number of lost committed groups."""
    lineage = facts.lineage
    committed = _groups_in(store.run(operations.committed_tasks()), run.group_size)
    forgotten = [g for g in sorted(facts.checkpointed) if g >= len(committed) or not committed[g]]
    if forgotten:
        store.run(operations.restore_committed(lineage, forgotten))
    # Other groups in an old claim of a committed batch were not trained: back to the buffer.
    for claim in store.run(operations.stats()).claims:
        if claim.k <= facts.checkpoint_step:
            store.run(operations.reconcile(lineage, claim.k, ()))
    for k, groups in sorted(facts.batches.items()):
        store.run(operations.reconcile(lineage, k, groups, mask=facts.masks.get(k)))
    store.run(operations.advance(lineage, facts.step))
    store.run(operations.commit(lineage, facts.checkpoint_step))
    return len(forgotten)


def _create_again(store: RunsOperations, run: RunSettings, facts: LedgerSnapshot) -> int:
    """Create the groups that are missing from the store; returns the number of tasks."""
    exists = known_groups(store, run)
    missing = [g for g in range(facts.reach) if g >= len(exists) or not exists[g]]
    if run.sampler != UNIFORM:  # the feeder creates those that have no choice yet
        missing = [g for g in missing if g in facts.choices]
    if not missing:
        return 0
    tasks = training_tasks(run, missing, facts.asked)
    return store.run(operations.create(facts.lineage, tasks))


def _reopen_rounds(store: RunsOperations, run: RunSettings, facts: LedgerSnapshot) -> None:
    """Create the missing tasks of open evaluation rounds, and close rounds that have ended."""
    for step in range(facts.step + 1):
        if step in facts.open_rounds:
            tasks = round_tasks(run, facts.lineage, step)
            store.run(operations.create(facts.lineage, tasks))
        elif is_due(run, step):
            store.run(operations.close_eval(facts.lineage, step))


def known_groups(store: RunsOperations, run: RunSettings) -> npt.NDArray[np.bool_]:
    """Read which groups the store has. Shape [groups, at least up to the last that it has]."""
    return _groups_in(store.run(operations.known_tasks()), run.group_size)


def _groups_in(bits: bytes, group_size: int) -> npt.NDArray[np.bool_]:
    """Reduce a bitmap of tasks to the groups with a member in it. Shape [groups]."""
    tasks = np.unpackbits(np.frombuffer(bits, dtype=np.uint8))
    padded = np.pad(tasks, (0, -len(tasks) % group_size))
    return np.asarray(padded.reshape(-1, group_size).any(axis=1))
