"""Episodes from the records of tasks: fetch, decode, shape the rewards; removal of old objects.

Every rank reads its own; `nyala env` and the checks before a run shape rewards as it does.
Separates readable records from unreadable ones; policy lag is judged in `group_filter.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import structlog

from buffer import operations
from buffer.operations.values import ClaimedUnit
from buffer.record.codec import decode_episode
from buffer.record.episode import Episode, longest_path
from buffer.record.object_store import ObjectStore, is_reference
from configs.errors import RecordError
from configs.settings import BufferSettings, RewardSettings, RunSettings

from .retrying_store import RetryingStore

log = structlog.get_logger()

ON_ITS_WAY_S = 3600.0  # an actor resends for minutes; an older object will not be submitted again

OVERLONG = "overlong"
"""The punishment's name among the parts of a reward."""


class Records:
    """Reads the episodes of tasks from Redis or from the object store."""

    def __init__(
        self,
        store: RetryingStore,
        run: RunSettings,
        buffer: BufferSettings,
        rewards: RewardSettings,
    ) -> None:
        self._store = store
        self._rewards = rewards
        self._max_completion_tokens = run.max_completion_tokens
        self._objects = ObjectStore.from_settings(buffer, run.name)

    def units(
        self, units: Sequence[ClaimedUnit]
    ) -> Iterable[tuple[ClaimedUnit, list[Episode] | None]]:
        """Read the episodes of units, in order; None for a unit with a bad record, which is logged.

        A bad record is missing, malformed, or of another task.
        """
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
            RecordError: A record is missing, malformed, or of another task.
        """
        records = self._store.run(operations.records(task_ids))
        return [self._episode(i, record) for i, record in zip(task_ids, records, strict=True)]

    def encoded(self, task_ids: Sequence[int]) -> list[bytes]:
        """Read the records of tasks of a sealed batch as actors encoded them.

        Raises:
            RecordError: A record is missing.
        """
        records = self._store.run(operations.records(task_ids))
        return [self._record(i, record) for i, record in zip(task_ids, records, strict=True)]

    def sweep(self, *, older_than_s: float = ON_ITS_WAY_S) -> None:
        """Remove objects of that age that the store no longer refers to.

        Does nothing without an object store. Its errors are logged; the next call tries again.
        """
        if self._objects is None:
            return
        try:
            self._objects.sweep(
                lambda ids: self._store.run(operations.references(ids)), older_than_s=older_than_s
            )
        except OSError as error:  # garbage does no harm, and the next commit sweeps again
            log.warning("objects not removed", reason=str(error))

    def _record(self, task_id: int, record: bytes | None) -> bytes:
        """Return a record that the store has, or refers to."""
        if record is None:
            raise RecordError(
                f"the record of task {task_id} must be in the store, got none; see that Redis "
                "evicts no keys (maxmemory-policy noeviction)"
            )
        if is_reference(record):
            if self._objects is None:
                raise RecordError(
                    f"the record of task {task_id} must be in Redis, got a reference to an object "
                    "store; set buffer.object_store to the address that the broker has there"
                )
            record = self._objects.get(task_id, record)
        return record

    def _episode(
        self, task_id: int, record: bytes | None, unit: ClaimedUnit | None = None
    ) -> Episode:
        episode = decode_episode(self._record(task_id, record))
        group_id = episode.group_id if unit is None else unit.group_id
        if (episode.task_id, episode.group_id) != (task_id, group_id):
            raise RecordError(
                f"the record must be of task {task_id} of group {group_id}, got one of task "
                f"{episode.task_id} of group {episode.group_id}; there is nothing to do: its group "
                "is dropped, or its sealed batch given up"
            )
        return shape_reward(
            episode, self._rewards, max_completion_tokens=self._max_completion_tokens
        )


def shape_reward(
    episode: Episode, rewards: RewardSettings, *, max_completion_tokens: int
) -> Episode:
    """Weigh the parts of a reward, punish length, and mask episodes that were cut off.

        reward = sum of weight x part (or the actor's own reward) + overlong punishment

    A pure function of one record and the settings: every rank shapes what it reads, and a replayed
    batch gets the same rewards.

    Args:
        episode: Episode as the actor made it.
        rewards: Weights of the parts, and the penalties of length.
        max_completion_tokens: The limit that cut episodes off.
    """
    completion = episode.completion
    length = longest_path(completion.branches, len(completion.token_ids))
    reward, parts = shaped(
        episode.reward,
        episode.reward_parts,
        rewards,
        tokens=(length, max_completion_tokens),
    )
    if rewards.overlong_filter and episode.finish_reason == "length":
        completion = replace(completion, loss_mask=np.zeros_like(completion.loss_mask))
    return replace(episode, reward=reward, reward_parts=parts, completion=completion)


def shaped(
    reward: float, parts: dict[str, float], rewards: RewardSettings, *, tokens: tuple[int, int]
) -> tuple[float, dict[str, float]]:
    """Weigh the parts of a reward and punish length; return reward and parts.

    Without weights the reward stays; the punishment is one more part. A part that is missing
    counts 0.

    Args:
        reward: Reward as the actor computed it.
        parts: Parts of that reward.
        rewards: Weights of the parts, and the penalties of length.
        tokens: Length of the completion, of its longest path behind the prompt where it has
            branches, and the limit that cuts completions off.
    """
    if rewards.weights:
        reward = sum(weight * parts.get(name, 0.0) for name, weight in rewards.weights.items())
    if buffer := rewards.overlong_buffer_tokens:
        punishment = rewards.overlong_penalty * overlong(*tokens, buffer)
        reward += punishment
        parts = parts | {OVERLONG: punishment}
    return reward, parts


def overlong(length: int, limit: int, buffer: int) -> float:
    """Punish a completion for its length, before the limit does.

    0 up to limit - buffer tokens, then (limit - buffer - length) / buffer, -1 from the limit on.

    Source:
        Yu et al. 2025 (DAPO), arXiv:2503.14476, equation 13.
    """
    return -min(1.0, max(0.0, (length - (limit - buffer)) / buffer))


def missing_parts(episodes: Iterable[Episode], settings: RewardSettings) -> tuple[str, ...]:
    """Name the parts of the reward that have a weight and that no episode has.

    The caller warns and raises no error: an actor must not be able to end the run. A part that only
    some episodes have counts 0 in the others.
    """
    names = {name for episode in episodes for name in episode.reward_parts}
    return tuple(name for name in settings.weights if name not in names)
