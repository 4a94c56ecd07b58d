"""From the records of a batch to its episodes, as they are trained on: decoded and shaped.

Nothing here judges a policy's age; a record that cannot be read is told from one that can.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import structlog

from buffer import operations
from buffer.answers import ClaimedUnit
from buffer.codec import decode_episode
from buffer.episode import Episode
from configs.errors import RecordError
from configs.settings import Settings

from .patience import PatientStore
from .shaping import shape

log = structlog.get_logger()


def read_units(
    store: PatientStore, units: Sequence[ClaimedUnit], settings: Settings
) -> Iterable[tuple[ClaimedUnit, list[Episode] | None]]:
    """Read the episodes of units, in order; None where a record is missing or malformed."""
    ids = [task_id for unit in units for task_id in unit.task_ids]
    if not ids:
        return
    records = dict(zip(ids, store.run(operations.records(ids)), strict=True))
    for unit in units:
        episodes = _decode(unit, records)
        yield unit, episodes and [shape(episode, settings) for episode in episodes]


def read_episodes(
    store: PatientStore, task_ids: Sequence[int], settings: Settings
) -> list[Episode]:
    """Read the episodes of tasks of a sealed batch.

    Raises:
        RecordError: One is missing or malformed.
    """
    records = store.run(operations.records(task_ids))
    missing = [task for task, record in zip(task_ids, records, strict=True) if record is None]
    if missing:
        raise RecordError(f"records of a sealed batch are gone: tasks {missing[:5]}")
    return [shape(decode_episode(r), settings) for r in records if r is not None]


def _decode(unit: ClaimedUnit, records: Mapping[int, bytes | None]) -> list[Episode] | None:
    episodes = []
    for task_id in sorted(unit.task_ids):
        record = records[task_id]
        try:
            if record is None:
                raise RecordError("the store has no such record")
            episode = decode_episode(record)
            if (episode.task_id, episode.group_id) != (task_id, unit.group_id):
                raise RecordError(f"it is the record of task {episode.task_id}")
        except RecordError as error:
            log.error("unreadable record", task_id=task_id, group=unit.group_id, reason=str(error))
            return None
        episodes.append(episode)
    return episodes
