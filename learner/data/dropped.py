"""What was taken out of batches before they were trained, and of what lengths it was.

Long episodes take longest to make, so they are the first to be too old: dropping by age is dropping
by length unless somebody looks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from buffer.record.episode import Episode

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
class Dropped:
    """What was taken out of claims in this life, as far as it was readable; units in any case."""

    units: dict[str, int] = field(default_factory=dict)
    """Units by reason."""
    tokens: int = 0
    """Completion tokens that were sampled and not trained."""
    episodes_by_length: Counter[str] = field(default_factory=Counter)

    def add_units(self, reason: str, count: int) -> None:
        """Count units that are dropped for this reason."""
        self.units[reason] = self.units.get(reason, 0) + count

    def add_episodes(self, episodes: Iterable[Episode]) -> None:
        """Count what was generated in vain."""
        episodes = list(episodes)
        self.tokens += sum(len(episode.completion.token_ids) for episode in episodes)
        self.episodes_by_length += by_length(episodes)
