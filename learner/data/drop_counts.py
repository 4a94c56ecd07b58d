"""Counts of groups dropped from batches before training, by reason and by length.

Long episodes take longest to sample, so they are the first to be stale: dropping by lag is also
dropping by length, which these counts make visible.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from buffer.operations.values import Stats
from buffer.record.episode import Episode
from configs.errors import DeterminismError
from configs.settings import RunSettings

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


def refuse_losses(stats: Stats, run: RunSettings, step: int) -> None:
    """Refuse to go on without a task of a run that is to be the same each time.

    Args:
        stats: Counts of the store.
        run: Settings of the run.
        step: The batch that is being filled.

    Raises:
        DeterminismError: One has died, was dropped, or was trained before an older checkpoint.
    """
    before = (step - 1) * run.groups_per_batch * run.group_size
    lost = stats.dropped | {"dead": stats.dead, "trained already": stats.committed - before}
    counts = ", ".join(f"{number} {reason}" for reason, number in lost.items() if number > 0)
    if counts:
        raise DeterminismError(
            f"every task must be in its own batch with run.deterministic, got {counts} at batch "
            f"{step}; mend what `nyala buffer dead list {run.folder}` and the logs show, then "
            f"begin again with --fresh"
        )
