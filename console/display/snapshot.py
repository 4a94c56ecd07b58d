"""A run at one moment, as the displays of `nyala up` and `nyala top` get it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from buffer.operations.values import ActorSeen
from learner.reporting.sample_lines import SampleLine

from .progress import Progress


@dataclass(frozen=True, slots=True)
class Fill:
    """Groups that are begun and not yet trained, and how many may be."""

    sampling: int
    """Leased, or ready again."""
    waiting: int
    """Complete, and in no batch."""
    claimed: int
    """In batches that are not trained yet."""
    admitted: int
    """Most that actors with the newest weights may begin."""
    memory: float
    """Used share of Redis' memory; 0 without a limit."""

    @property
    def groups(self) -> int:
        """All of them."""
        return self.sampling + self.waiting + self.claimed


@dataclass(frozen=True, slots=True)
class View:
    """The state of a run at one moment."""

    progress: Progress
    stages: Mapping[str, str]
    """Process -> its stage of starting, until the first batch of this session."""
    actors_alive: int
    is_training: bool = True
    """The first batch of this session is trained."""
    alarm: str | None = None
    """Why nobody samples, for as long as nobody does."""
    elapsed_s: float | None = None
    """Since the processes were started."""
    actors: tuple[ActorSeen, ...] = ()
    """Heard of within the hour; none while nobody can be asked."""
    silent_after_s: float = 0.0
    """An actor that was not heard for longer counts as gone."""
    fill: Fill | None = None
    closed: tuple[str, ...] = ()
    """To whom nothing is leased, and why."""
    sample: SampleLine | None = None
    """The newest sampled text."""
