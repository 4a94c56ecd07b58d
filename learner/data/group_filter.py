"""The filter of groups before training: impossible, stale, or without variance of rewards.

Decides from a group's episodes alone; `claims.py` drops groups in the store.
"""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from buffer.record.episode import Episode, PolicyVersion
from configs.settings import AlgorithmSettings, BufferSettings, RunSettings

from .ledger import Ledger
from .policy_lag import oldest_lag

log = structlog.get_logger()

UNREADABLE, STALE, ZERO_VARIANCE = "unreadable", "stale", "zero_variance"
"""Reasons as the store counts them."""


class GroupFilter:
    """Decides which groups a batch is trained on."""

    def __init__(
        self,
        run: RunSettings,
        buffer: BufferSettings,
        algorithm: AlgorithmSettings,
        *,
        ledger: Ledger,
        vocabulary: int,
    ) -> None:
        self._max_policy_lag = None if buffer.on_stale == "train" else run.max_policy_lag
        self._is_filtering = algorithm.filter_zero_variance
        self._max_filtered = (algorithm.max_gen_batches - 1) * run.groups_per_batch
        self._ledger = ledger
        self._vocabulary = vocabulary
        self.num_filtered = 0
        """Groups of equal rewards dropped from the present batch."""

    def begin_batch(self) -> None:
        """Start counting the groups of equal rewards of another batch."""
        self.num_filtered = 0

    def reason_to_drop(self, step: int, episodes: Sequence[Episode]) -> str | None:
        """Name the reason not to train a group in batch `step`; None to train it."""
        if self._is_impossible(step, episodes):
            return UNREADABLE
        if self._is_stale(step, episodes):
            return STALE
        if not self._is_filtering or len({episode.reward for episode in episodes}) > 1:
            return None
        if self.num_filtered < self._max_filtered:
            self.num_filtered += 1
            return ZERO_VARIANCE
        log.warning("a group of equal rewards is trained", step=step, filtered=self.num_filtered)
        return None

    def _is_impossible(self, step: int, episodes: Sequence[Episode]) -> bool:
        """Find episodes that no policy of this run can have sampled; training them would crash."""
        newest = PolicyVersion(self._ledger.lineage, step - 1)
        for episode in episodes:
            completion = episode.completion
            token = int(max(episode.prompt_ids.max(), completion.token_ids.max()))
            version = max(span.version for span in completion.versions)
            if token >= self._vocabulary or version > newest:
                log.error(
                    "impossible record",
                    task_id=episode.task_id,
                    largest_token=token,
                    vocabulary=self._vocabulary,
                    newest_version=f"{version.lineage}.{version.step}",
                )
                return True
        return False

    def _is_stale(self, step: int, episodes: Sequence[Episode]) -> bool:
        if self._max_policy_lag is None:
            return False
        lineage, lineages = self._ledger.lineage, self._ledger.lineages
        return any(oldest_lag(e, step, lineage, lineages) > self._max_policy_lag for e in episodes)
