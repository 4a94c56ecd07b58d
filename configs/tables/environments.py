"""`run.environments`: several environments of one run, and which of them an item is of."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from random import Random
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from .base import NonNegative, Positive, SettingsTable

OF_ROWS = ("dataset", "agent")
"""Environments whose settings name files of rows."""
BLOCK = 1000
"""Items among which shares are kept exactly: a share is a number of thousandths."""
PATTERNS = 8  # of the blocks that groups in flight are of, and of those that metrics look back at


class OneEnvironment(SettingsTable):
    """One environment of several; settings that it leaves out are as in `run`."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")] | None = None
    """Name in metrics and messages; null = the name of the environment or its class.

    Change it when two environments would have the same name."""
    environment: str
    """As `run.environment`."""
    environment_settings: dict[str, Any] = Field(default_factory=dict)
    """As `run.environment_settings`."""
    environment_requirements: tuple[str, ...] = ()
    """As `run.environment_requirements`."""
    environment_python: str | None = None
    """As `run.environment_python`."""
    share: NonNegative = 1.0
    """Share of the groups that are trained, over the sum of all shares; 0 = the environment is only
    evaluated and never trained on.

    Change it when one environment should be trained more often than another."""
    reward: str | Annotated[list[str], Field(min_length=1)] | None = None
    """As `run.reward`; null = `run.reward`."""
    eval_episodes: Annotated[int, Field(ge=0)] | None = None
    """As `run.eval_episodes`; null = `run.eval_episodes`."""

    sampler_prompts: Positive | None = None
    """As `run.sampler_prompts`; null = `run.sampler_prompts`."""

    @property
    def title(self) -> str:
        """The name that is set, or that of the environment."""
        return self.name or self.environment.rpartition(":")[2]


class MixtureItem(NamedTuple):
    """The environment of an item, and its number there."""

    environment: int
    """Number of the environment, in the order of the settings."""
    item: int
    """Number of the item among those of this environment."""


class Mixture:
    """Assigns each item of a run to an environment, alike in all processes and all their lives.

    Training items come in blocks. Each block has as many items of an environment as its share says,
    spread evenly, and their order follows from the seed and the number of the block: the place of
    an item needs no other item. Items of one environment are numbered without gaps.

    Example:
        >>> mixture = Mixture(0, shares=[3, 1], eval_episodes=[2, 2])
        >>> sorted(mixture.training(item) for item in range(1000))[-1]
        MixtureItem(environment=1, item=249)
        >>> mixture.held_out(3)
        MixtureItem(environment=1, item=1)
    """

    def __init__(self, seed: int, *, shares: Sequence[float], eval_episodes: Sequence[int]) -> None:
        """Divide items among environments by shares.

        Args:
            seed: Seed of the run.
            shares: Share of each environment; at least one is above 0.
            eval_episodes: Number of questions of each environment in an evaluation.
        """
        self._seed = seed
        self._counts = _apportion(shares)
        self._eval_episodes = tuple(eval_episodes)

    @property
    def num_questions(self) -> int:
        """Held-out questions of an evaluation, of all environments together."""
        return sum(self._eval_episodes)

    def training(self, item: int) -> MixtureItem:
        """Return the place of a training item."""
        if len(self._counts) == 1:
            return MixtureItem(0, item)
        block, at = divmod(item, BLOCK)
        environment, nth = _pattern(self._seed, block, self._counts)[at]
        return MixtureItem(environment, block * self._counts[environment] + nth)

    def training_item(self, environment: int, item: int) -> int:
        """Return the training item whose place is item `item` of an environment."""
        if len(self._counts) == 1:
            return item
        block, nth = divmod(item, self._counts[environment])
        pattern = _pattern(self._seed, block, self._counts)
        return block * BLOCK + pattern.index((environment, nth))

    def held_out(self, item: int) -> MixtureItem:
        """Return the place of a held-out item; the first environment has the first items."""
        for environment, count in enumerate(self._eval_episodes[:-1]):
            if item < count:
                return MixtureItem(environment, item)
            item -= count
        return MixtureItem(len(self._eval_episodes) - 1, item)


def _apportion(shares: Sequence[float]) -> tuple[int, ...]:
    """Divide a block by shares; what is left over goes to the largest remainders."""
    exact = [BLOCK * share / sum(shares) for share in shares]
    counts = [int(count) for count in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: BLOCK - sum(counts)]:
        counts[i] += 1
    return tuple(counts)


@lru_cache(PATTERNS)
def _pattern(seed: int, block: int, counts: tuple[int, ...]) -> Sequence[tuple[int, int]]:
    """List the environment of each item of a block, and its number among those of it there."""
    random = Random((seed << 40) + block)
    # One at random within each of `count` equal stretches: no batch is far from the shares.
    places = [
        ((nth + random.random()) / count, environment, nth)
        for environment, count in enumerate(counts)
        for nth in range(count)
    ]
    return [(environment, nth) for _, environment, nth in sorted(places)]
