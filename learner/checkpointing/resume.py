"""How a life of the learner begins: newest checkpoint -> new lineage -> recovery -> replay.

A store that lost writes, or everything, is put right here as after a rewind in mid-life; one that
lost nothing is only told what it knows.

Decides on rank 0 and tells all ranks, so that every rank loads the same checkpoint into the same
lineage.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgpack
import numpy as np
import structlog

from buffer import operations
from buffer.operations.values import Stats
from configs.errors import CheckpointError, LostLineage
from configs.hashes import settings_hash
from configs.settings import Settings
from configs.validation.store import memory_shortage
from learner.data.ledger import Facts, Ledger, from_ranges
from learner.data.retrying_store import RetryingStore
from learner.reporting.metrics import Totals
from learner.training.guards import GuardState

from .checkpoint import Checkpoints, LearnerState
from .lineages import LineageFile
from .recovery import known_groups, recover, register_run

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class StartState:
    """What every rank must know before the first batch of a life."""

    lineage: int
    lineages: dict[int, int]
    """lineage -> step it forked at, this one included."""
    owner: str
    """Of the take-over that began this lineage."""
    state: LearnerState
    """Where the run stands."""
    checkpoint: Path | None
    """To load; None = the initial weights."""
    reach: int
    """Groups below it exist, by the cursor of the checkpoint or by the store."""
    asked_again: dict[int, int | None]
    """Group dropped as too old -> the one that asks its prompt again; None = none does yet."""

    def encode(self) -> bytes:
        """Turn it into msgpack bytes."""
        path = None if self.checkpoint is None else str(self.checkpoint)
        lineages = list(self.lineages.items())
        again = list(self.asked_again.items())
        state = self.state.encode()
        fields = (self.lineage, lineages, self.owner, state, path, self.reach, again)
        return bytes(msgpack.packb(fields) or b"")

    @classmethod
    def decode(cls, encoded: bytes) -> StartState:
        """Read what `encode` wrote."""
        lineage, lineages, owner, state, path, reach, again = msgpack.unpackb(encoded)
        return cls(
            lineage=lineage,
            lineages=dict(lineages),
            owner=owner,
            state=LearnerState.decode(state),
            checkpoint=None if path is None else Path(path),
            reach=reach,
            asked_again=dict(again),
        )

    def ledger(self) -> Ledger:
        """Begin the ledger of this life."""
        return Ledger(
            Facts(
                lineage=self.lineage,
                owner=self.owner,
                lineages=self.lineages,
                step=self.state.step,
                checkpoint_step=self.state.step,
                checkpointed=from_ranges(self.state.trained),
                reach=self.reach,
                second_tries={
                    g: dropped for dropped, g in self.asked_again.items() if g is not None
                },
                waiting=tuple(sorted(d for d, group in self.asked_again.items() if group is None)),
            )
        )


def take_over(settings: Settings, store: RetryingStore, checkpoints: Checkpoints) -> StartState:
    """Take the run over at its newest checkpoint; rank 0 only.

    Raises:
        CheckpointError: None of the checkpoints is intact, or they are of another run.
        SettingsError: The run began with other settings.
        LostLineage: Another learner took the run over at the same moment.
    """
    newest = checkpoints.newest()
    state, path = _fresh_state(settings), None
    if newest is not None:
        path, state = newest
        _check_same_run(settings, state, path)
    run_id = store.trust()
    register_run(store, settings.run, settings.buffer)
    store.run(operations.confirm(run_id))
    if text := memory_shortage(
        settings.run, settings.buffer, store.run(operations.memory()).limit_bytes
    ):
        log.warning("%sraise it, or lower buffer.max_uncommitted_bytes", text)
    stats = store.run(operations.stats())
    _report(stats, state)
    start = _begin_lineage(settings, store, stats, state, path)
    recover(store, run_id, run=settings.run, buffer=settings.buffer, facts=start.ledger().facts)
    log.info("life begins", lineage=start.lineage, step=state.step, checkpoint=str(path or "none"))
    return start


def _report(stats: Stats, state: LearnerState) -> None:
    """Say where store and checkpoint do not tell the same story."""
    if stats.lineage < state.lineage:
        log.error(
            "THE STORE IS OLDER THAN THE CHECKPOINT: Redis was wiped, rewound, or is another one; "
            "what it has not got is made again",
            store_lineage=stats.lineage,
            lineage=state.lineage,
            step=state.step,
        )
    if stats.committed_step > state.step:
        log.error(
            "RESUMING BEFORE THE LAST COMMIT: a checkpoint was lost, and its batches with it",
            committed_step=stats.committed_step,
            step=state.step,
        )


def _begin_lineage(
    settings: Settings, store: RetryingStore, stats: Stats, state: LearnerState, path: Path | None
) -> StartState:
    """Begin a lineage that no learner of this run has had, and remember it."""
    file = LineageFile(settings.run.folder)
    remembered = file.read()
    owner = operations.new_owner()
    lineage = store.run(
        operations.begin_lineage(
            stats.lineage,
            state.step,
            owner=owner,
            at_least=max([state.lineage, *remembered]) + 1,
        )
    )
    if lineage is None:
        raise LostLineage("another learner has just taken the run over; this one must stop")
    lineages = remembered | store.run(operations.lineages())
    file.write(lineages)
    known = np.flatnonzero(known_groups(store, settings.run))
    return StartState(
        lineage,
        lineages,
        owner,
        state,
        path,
        reach=max(state.cursor, int(known[-1]) + 1 if len(known) else 0),
        asked_again=store.run(operations.recreations()),
    )


def _fresh_state(settings: Settings) -> LearnerState:
    return LearnerState(
        run=settings.run.name,
        settings_hash=settings_hash(settings.run),
        step=0,
        lineage=0,
        cursor=0,
        trained=(),
        totals=Totals(),
        guards=GuardState(),
    )


def _check_same_run(settings: Settings, state: LearnerState, path: Path) -> None:
    """Refuse other settings: the task of an id depends on them, and some would be trained twice."""
    if (state.run, state.settings_hash) != (settings.run.name, settings_hash(settings.run)):
        raise CheckpointError(
            f"{path} must be of run {settings.run.name!r} with the same `run:` settings, got one "
            f"of {state.run!r} with others; restore the settings, or begin again with --fresh"
        )
