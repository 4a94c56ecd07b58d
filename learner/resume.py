"""How a life of the learner begins: newest checkpoint -> new lineage -> COMMIT -> ready to replay.

Decides on rank 0 and tells all ranks, so that every rank loads the same checkpoint into the same
lineage.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgpack
import structlog

from buffer import operations
from configs.errors import CheckpointError, LostLineage
from configs.identity import run_hashes
from configs.loader import settings_hash
from configs.settings import Settings

from .checkpoint import Checkpoints, LearnerState
from .metrics import Totals
from .patience import PatientStore

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Opening:
    """What every rank must know before the first batch of a life."""

    lineage: int
    lineages: dict[int, int]
    """lineage -> step it forked at, this one included."""
    state: LearnerState
    """Where the run stands."""
    checkpoint: Path | None
    """To load; None = the initial weights."""

    def encode(self) -> bytes:
        """Turn it into msgpack bytes."""
        path = None if self.checkpoint is None else str(self.checkpoint)
        fields = (self.lineage, list(self.lineages.items()), self.state.encode(), path)
        return bytes(msgpack.packb(fields) or b"")

    @classmethod
    def decode(cls, encoded: bytes) -> Opening:
        """Read what `encode` wrote."""
        lineage, lineages, state, path = msgpack.unpackb(encoded)
        return cls(
            lineage=lineage,
            lineages=dict(lineages),
            state=LearnerState.decode(state),
            checkpoint=None if path is None else Path(path),
        )


def open_life(settings: Settings, store: PatientStore, checkpoints: Checkpoints) -> Opening:
    """Take the run over at its newest checkpoint; rank 0 only.

    Raises:
        CheckpointError: None of the checkpoints is intact, they are of another run, or the store
            has lost the run.
        SettingsError: The run began with other settings.
        LostLineage: Another learner took the run over at the same moment.
    """
    newest = checkpoints.newest()
    state, path = _fresh_state(settings), None
    if newest is not None:
        path, state = newest
        _check_same_run(settings, state, path)
    if path is not None and not store.run(operations.lineages()):
        raise CheckpointError(
            f"the store must know the run that {path} is from, got an empty one; Redis was wiped "
            "or is another one: restore its files, or begin again with --fresh"
        )
    _enter(settings, store)
    stats = store.run(operations.stats())
    if stats.committed_step > state.step:
        log.error(
            "RESUMING BEFORE THE LAST COMMIT: a checkpoint was lost, and its batches with it",
            committed_step=stats.committed_step,
            step=state.step,
        )
    lineage = store.run(operations.begin_lineage(stats.lineage, state.step))
    if lineage is None:
        raise LostLineage("another learner has just taken the run over; this one must stop")
    if state.step:
        store.run(operations.commit(lineage, state.step))
    lineages = store.run(operations.lineages())
    log.info("life begins", lineage=lineage, step=state.step, checkpoint=str(path or "none"))
    return Opening(lineage=lineage, lineages=lineages, state=state, checkpoint=path)


def _fresh_state(settings: Settings) -> LearnerState:
    return LearnerState(
        run=settings.run.name,
        settings_hash=settings_hash(settings),
        step=0,
        lineage=0,
        cursor=0,
        totals=Totals(),
    )


def _check_same_run(settings: Settings, state: LearnerState, path: Path) -> None:
    """Refuse other settings: the task of an id depends on them, and some would be trained twice."""
    if (state.run, state.settings_hash) != (settings.run.name, settings_hash(settings)):
        raise CheckpointError(
            f"{path} must be of run {settings.run.name!r} with the same `run:` settings, got one "
            f"of {state.run!r} with others; restore the settings, or begin again with --fresh"
        )


def _enter(settings: Settings, store: PatientStore) -> None:
    """Enter the run into the store, or check that the one there has the same settings."""
    run, buffer = settings.run, settings.buffer
    store.run(
        operations.begin_run(
            settings_hash(settings),
            run_hashes(settings),
            units_per_batch=run.groups_per_batch,
            max_policy_lag=run.max_policy_lag,
            margin=buffer.margin,
            group_size=run.group_size,
            min_group_size=min(buffer.min_group_size, run.group_size),
        )
    )
