"""Filter of groups before training (impossible, stale, equal rewards); counts of those dropped.

Decides from a group's episodes alone; `claims.py` asks it on rank 0, and drops groups in the store.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import structlog

from buffer.record.episode import Episode, PolicyVersion
from buffer.record.rules import EpisodeLimits
from configs.errors import RecordError
from configs.settings import AlgorithmSettings, BufferSettings, RewardSettings, RunSettings

from .grades import ACCURACY, EXACT, weighs_exact
from .ledger import Ledger
from .policy_lag import FreshTokens, trained_lags
from .records import OVERLONG

# --------------------------------------------------------------------------------------------------
# Counts of groups dropped from batches before training, by reason and by length.
#
# Long episodes take longest to sample, so they are the first to be stale: dropping by lag is also
# dropping by length, which these counts make visible.

LENGTH_BOUNDS = (128, 512, 2048, 8192, 32768)
"""Completion tokens; each bucket is four times as wide as the one before."""


def length_bucket(tokens: int) -> str:
    """Name the bucket of a completion's length, such as `<=512`."""
    for bound in LENGTH_BOUNDS:
        if tokens <= bound:
            return f"<={bound}"
    return f">{LENGTH_BOUNDS[-1]}"


def by_length(episodes: Iterable[Episode]) -> Counter[str]:
    """Count episodes by the length of their completion."""
    return Counter(length_bucket(len(episode.completion.token_ids)) for episode in episodes)


@dataclass(slots=True)
class DropCounts:
    """Counts of one life of the learner; tokens and lengths only of readable episodes."""

    units: dict[str, int] = field(default_factory=dict)
    """Units by reason."""
    tokens: int = 0
    """Completion tokens that were sampled and not trained."""
    episodes_by_length: Counter[str] = field(default_factory=Counter)

    def add_units(self, reason: str, count: int) -> None:
        """Count units dropped for this reason."""
        self.units[reason] = self.units.get(reason, 0) + count

    def add_episodes(self, episodes: Iterable[Episode]) -> None:
        """Count the tokens and lengths of dropped episodes."""
        episodes = list(episodes)
        self.tokens += sum(len(episode.completion.token_ids) for episode in episodes)
        self.episodes_by_length += by_length(episodes)


# --------------------------------------------------------------------------------------------------
# The filter of groups before training: impossible, stale, or without variance of rewards.

log = structlog.get_logger()

UNREADABLE, IMPOSSIBLE, STALE = "unreadable", "impossible", "stale"
ZERO_VARIANCE = "zero_variance"
"""Reasons as the store counts them."""
ENVIRONMENT = "environment"
"""The part that an actor adds where reward functions judge, and not the environment."""
DIGITS = 9  # of rewards: a punishment that is taken off again leaves its rounding


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
        rewards: RewardSettings | None = None,
    ) -> None:
        self._max_policy_lag = run.max_policy_lag
        self._on_stale = buffer.on_stale
        self._is_filtering = algorithm.filter_zero_variance
        self._metric = algorithm.filter_metric
        self._trains_exact = rewards is None or weighs_exact(rewards)
        self._max_filtered = (algorithm.max_gen_batches - 1) * run.groups_per_batch
        self._ledger = ledger
        self._limits = EpisodeLimits.for_run(run, vocabulary=vocabulary)
        self.num_filtered = 0
        """Groups of equal rewards dropped from the present batch."""
        self.stale_tokens = FreshTokens()
        """Tokens of groups dropped from it as stale."""

    def begin_batch(self) -> None:
        """Start counting dropped groups for another batch."""
        self.num_filtered = 0
        self.stale_tokens = FreshTokens()

    def reason_to_drop(self, step: int, episodes: Sequence[Episode]) -> str | None:
        """Name the reason not to train a group in batch `step`; None to train it.

        A group of equal rewards is counted in `num_filtered`; once as many are counted as
        `algorithm.max_gen_batches` allows for this batch, the next are trained.
        """
        if self._is_impossible(step, episodes):
            return IMPOSSIBLE
        if self._is_stale(step, episodes):
            return STALE
        if not self._is_filtering or len({self._outcome(episode) for episode in episodes}) > 1:
            return None
        if self.num_filtered < self._max_filtered:
            self.num_filtered += 1
            return ZERO_VARIANCE
        log.warning("a group of equal rewards is trained", step=step, filtered=self.num_filtered)
        return None

    def _outcome(self, episode: Episode) -> float:
        """Return the value by which the members of a group are compared."""
        parts = episode.reward_parts
        reward = round(episode.reward - parts.get(OVERLONG, 0.0), DIGITS)
        if self._metric is None:
            return reward
        values = episode.environment_metrics | parts
        if self._metric == ACCURACY and ACCURACY not in values:
            is_exact = self._trains_exact and EXACT in parts and ENVIRONMENT not in parts
            return parts[EXACT] if is_exact else reward
        if self._metric not in values:
            log.error(
                "algorithm.filter_metric must be a part of the reward or a metric; the reward "
                "itself is compared",
                got=self._metric,
                known=sorted(values),
                task_id=episode.task_id,
            )
            return reward
        return values[self._metric]

    def _is_impossible(self, step: int, episodes: Sequence[Episode]) -> bool:
        """Find episodes that no policy of this run can have sampled; training them would crash.

        Brokers refuse them, but the records of a store may be older than its brokers.
        """
        newest = PolicyVersion(self._ledger.lineage, step - 1)
        for episode in episodes:
            try:
                self._limits.check_episode(episode)
                _check_version(episode, newest)
            except RecordError as error:
                log.error("impossible record", task_id=episode.task_id, reason=str(error))
                return True
        return False

    def _is_stale(self, step: int, episodes: Sequence[Episode]) -> bool:
        """Find groups with a stale token; where those are masked, groups without a fresh one."""
        if self._on_stale == "train":
            return False
        lags_N = trained_lags(episodes, step, self._ledger.lineage, self._ledger.lineages)
        if not len(lags_N):
            return False
        decisive = lags_N.min() if self._on_stale == "mask" else lags_N.max()
        if decisive <= self._max_policy_lag:
            return False
        self.stale_tokens += FreshTokens.dropped(lags_N, self._max_policy_lag)
        return True


def _check_version(episode: Episode, newest: PolicyVersion) -> None:
    version = max(span.version for span in episode.completion.versions)
    if version > newest:
        raise RecordError(
            f"tokens must be of versions up to {newest.lineage}.{newest.step}, got "
            f"{version.lineage}.{version.step}, which no learner has published; the group is "
            "dropped"
        )
