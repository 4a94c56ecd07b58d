"""From the records of a batch to its episodes, as they are trained on: fetched, decoded, shaped.

Nothing here judges a policy's age; a record that cannot be read is told from one that can.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import structlog

from buffer import operations
from buffer.operations.values import ClaimedUnit
from buffer.record.codec import decode_episode
from buffer.record.episode import Episode
from buffer.record.object_store import ObjectStore, is_reference
from configs.errors import RecordError
from configs.settings import Settings

from .retrying_store import PatientStore
from .shaping import shape

log = structlog.get_logger()

ON_ITS_WAY_S = 3600.0  # an actor resends for minutes; what is older than this nobody will submit


class Records:
    """Reads the episodes of tasks, wherever their records are."""

    def __init__(self, store: PatientStore, settings: Settings) -> None:
        self._store = store
        self._settings = settings
        self._objects = ObjectStore.of(settings.buffer, settings.run.name)

    def units(
        self, units: Sequence[ClaimedUnit]
    ) -> Iterable[tuple[ClaimedUnit, list[Episode] | None]]:
        """Read the episodes of units, in order; None where a record is missing or malformed."""
        ids = [task_id for unit in units for task_id in unit.task_ids]
        if not ids:
            return
        records = dict(zip(ids, self._store.run(operations.records(ids)), strict=True))
        for unit in units:
            try:
                yield unit, [self._episode(i, records[i], unit) for i in sorted(unit.task_ids)]
            except RecordError as error:
                log.error("unreadable record", group=unit.group_id, reason=str(error))
                yield unit, None

    def episodes(self, task_ids: Sequence[int]) -> list[Episode]:
        """Read the episodes of tasks of a sealed batch.

        Raises:
            RecordError: One is missing or malformed.
        """
        records = self._store.run(operations.records(task_ids))
        return [self._episode(i, record) for i, record in zip(task_ids, records, strict=True)]

    def sweep(self, *, older_than_s: float = ON_ITS_WAY_S) -> None:
        """Remove the objects that the store needs no longer."""
        if self._objects is not None:
            self._objects.sweep(
                lambda ids: self._store.run(operations.references(ids)), older_than_s=older_than_s
            )

    def _episode(
        self, task_id: int, record: bytes | None, unit: ClaimedUnit | None = None
    ) -> Episode:
        if record is None:
            raise RecordError(f"the record of task {task_id} must be in the store, got none")
        if is_reference(record):
            if self._objects is None:
                raise RecordError(
                    f"the record of task {task_id} must be in Redis, got a reference; "
                    "set buffer.object_store to what the broker has"
                )
            record = self._objects.get(task_id, record)
        episode = decode_episode(record)
        group_id = episode.group_id if unit is None else unit.group_id
        if (episode.task_id, episode.group_id) != (task_id, group_id):
            raise RecordError(
                f"the record must be of task {task_id} of group {group_id}, got one of task "
                f"{episode.task_id} of group {episode.group_id}"
            )
        return shape(episode, self._settings)
