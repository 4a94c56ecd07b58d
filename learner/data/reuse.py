"""Groups that are trained again: rate, draw, judge, forget. Rank 0 only.

    batch sealed, groups rated -> trained -> committed, kept -> drawn for a later batch -> ...

Implements the settings table `replay`; the store keeps the sets (`buffer/operations/batches.py`). A
reused group keeps its record, and with it the log-probs under which it was sampled: the learner's
correction is as exact as for a new one, only the policies lie further apart.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import structlog

from buffer import operations
from buffer.operations.values import ClaimedUnit, Rating
from buffer.record.episode import Episode
from configs.settings import ReplaySettings, RunSettings
from configs.validation.store import KEEP_AT_MEMORY

from .ledger import Ledger
from .policy_lag import trained_lags
from .records import Records
from .retrying_store import RetryingStore

log = structlog.get_logger()

TRIM_EVERY_S = 1.0  # kept groups must make way while a batch fills, or a full Redis stops actors


@dataclass(frozen=True, slots=True)
class ReusedGroup:
    """A group that a batch trains again."""

    uses: int
    """Times it will have been trained again after this batch."""
    episodes: list[Episode]


class Reuse:
    """Adds groups that were trained before to batches."""

    def __init__(
        self,
        store: RetryingStore,
        run: RunSettings,
        replay: ReplaySettings,
        *,
        ledger: Ledger,
        records: Records,
        is_masking: bool,
    ) -> None:
        self._store = store
        self._records = records
        self._run = run
        self._replay = replay
        self._ledger = ledger
        self._is_masking = is_masking
        self._trimmed_at: float | None = None
        share = self._replay.fraction / (1 - self._replay.fraction)
        groups = max(1, round(share * self._run.groups_per_batch))
        self._groups = groups if self._replay.capacity else 0

    def keep_within_bounds(self, step: int) -> None:
        """Drop groups that are too old for batch `step`, or too many; at most once a second."""
        now = time.monotonic()
        if self._trimmed_at is not None and now - self._trimmed_at < TRIM_EVERY_S:
            return
        self._trimmed_at = now
        forgotten = self._store.run(
            operations.trim_replay(
                self._ledger.lineage,
                units=self._replay.capacity // self._run.group_size,
                num_bytes=self._replay.max_bytes,
                born=step - 1 - self._replay.max_lag,
                memory_share=KEEP_AT_MEMORY,
            )
        )
        if forgotten:
            log.debug("forgot kept groups", step=step, groups=forgotten)

    def draw(self, step: int) -> dict[int, ReusedGroup]:
        """Draw kept groups for batch `step`, which is about to be sealed; by group.

        Groups that are too old or have lost a record are forgotten, and not replaced by others.
        """
        if not self._groups:
            return {}
        drawn = self._take(step, self._groups)
        fit = {group: kept for group, kept in drawn.items() if self._is_fit(step, kept)}
        if unfit := sorted(drawn.keys() - fit.keys()):
            log.info("forgetting kept groups", step=step, groups=len(unfit))
            self._store.run(operations.forget_reused(self._ledger.lineage, step, unfit))
        return {group: kept for group, kept in fit.items() if kept is not None}

    def replay(self, step: int) -> dict[int, ReusedGroup]:
        """Read the groups that a sealed batch reuses; they are not judged again.

        Those whose records the store has lost are logged and left out.
        """
        read = self._take(step, 0)
        if None in read.values():
            log.error("the store has lost records that a sealed batch reuses", step=step)
        return {group: reused for group, reused in read.items() if reused is not None}

    def rate(self, step: int, groups: Mapping[int, Sequence[Episode]]) -> list[Rating]:
        """Rate the new groups of batch `step` for the store to keep; empty if it keeps none."""
        if not self._replay.capacity:
            return []
        return [
            self._rating(group, episodes, step - 1 - self._lag(step, episodes))
            for group, episodes in groups.items()
        ]

    def _rating(self, group: int, episodes: Sequence[Episode], born: int) -> Rating:
        rank = 0.0
        if self._replay.sampling == "prioritised" and self._replay.priority == "advantage":
            rank = -spread(np.array([episode.reward for episode in episodes], dtype=np.float64))
        elif self._replay.sampling != "uniform":
            rank = -float(born)
        return Rating(group, self._replay.max_reuse, born, rank)

    def _take(self, step: int, groups: int) -> dict[int, ReusedGroup | None]:
        numbers = random.Random(f"{self._run.seed} replay {step}")
        units = self._store.run(
            operations.reuse(
                self._ledger.lineage,
                step,
                groups,
                sampling=self._replay.sampling,
                numbers=[numbers.random() for _ in range(groups)],
            )
        )
        uses = {unit.group_id: unit.uses + 1 for unit in units}
        claimed = [ClaimedUnit(unit.group_id, list(unit.task_ids)) for unit in units]
        return {
            unit.group_id: None if episodes is None else ReusedGroup(uses[unit.group_id], episodes)
            for unit, episodes in self._records.units(claimed)
        }

    def _is_fit(self, step: int, group: ReusedGroup | None) -> bool:
        """Judge the lag exactly: the store's own bound ignores abandoned branches."""
        return group is not None and self._lag(step, group.episodes) <= self._replay.max_lag

    def _lag(self, step: int, episodes: Sequence[Episode]) -> int:
        """Return the lag of the token by which a group is judged, as `GroupFilter` does it."""
        lags_N = trained_lags(episodes, step, self._ledger.lineage, self._ledger.lineages)
        if not len(lags_N):
            return 0
        return int(lags_N.min() if self._is_masking else lags_N.max())


def spread(rewards_G: np.ndarray) -> float:
    """Compute the mean distance of a group's rewards from their mean.

    It is the mean size of the group's advantages before any division by their deviation, which
    would make all groups nearly equal.
    """
    return float(np.abs(rewards_G - rewards_G.mean()).mean())
