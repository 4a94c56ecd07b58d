"""A run at one moment, as displays get it, and its figures as texts.

`nyala up` fills a `View` from its own processes, `nyala top` from files, store or broker.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from buffer.operations.values import ActorSeen
from learner.reporting.samples import SampleLine

from .progress import Progress

GONE_SHOWN_S = 120.0
"""An actor that ended is listed for so long, then counted alone: a crash loop buries the others."""


@dataclass(frozen=True, slots=True)
class GroupsInFlight:
    """Groups that are begun and not yet trained, and the most that may be begun."""

    sampling: int
    """Groups that are leased, or ready again."""
    waiting: int
    """Groups that are complete and in no batch."""
    claimed: int
    """Groups in batches that are not trained yet."""
    admitted: int
    """Most that actors with the newest weights may begin."""
    memory: float
    """Used share of Redis' memory; 0 without a limit."""
    batch: int = 0
    """Groups of a batch; 0 where that is not known."""

    @property
    def groups(self) -> int:
        """Number of all groups that are not trained yet."""
        return self.sampling + self.waiting + self.claimed


@dataclass(frozen=True, slots=True)
class View:
    """The state of a run at one moment."""

    progress: Progress
    stages: Mapping[str, str]
    """Process -> its stage of starting, until the first batch of this session."""
    actors_alive: int | None
    """Live actors; None = unknown, as no process that counts them has answered."""
    is_training: bool = True
    """Whether the first batch of this session is trained."""
    alarm: str | None = None
    """Reason why no actor samples; None while one does."""
    elapsed_s: float | None = None
    """Seconds since the processes were started."""
    actors: tuple[ActorSeen, ...] = ()
    """Actors heard of within the hour; none while the store and the broker are away."""
    silent_after_s: float = 0.0
    """An actor that has been silent for longer counts as gone."""
    fill: GroupsInFlight | None = None
    closed: tuple[str, ...] = ()
    """Holders to which nothing is leased, and why."""
    sample: SampleLine | None = None
    """The newest sampled text."""
    hosts: int | None = None
    """Hosts of agents that have conversations; None = the run has no agents, or is elsewhere."""


# --------------------------------------------------------------------------------------------------
# Figures of a run in words: numbers, spans of time, and the few that fit one line.


def figures(view: View) -> dict[str, str]:
    """Write the figures of a run for people; a missing one is a dash."""
    progress = view.progress
    return {
        "reward": number_or_dash(progress.reward, "{:.3f}"),
        **held_out_figures(progress),
        **{f"of {name}": f"{value:.3f}" for name, value in progress.scores.items()},
        "tokens/s": number_or_dash(progress.tokens_per_s, "{:,.0f}"),
        "policy lag": number_or_dash(progress.policy_lag, "{:.2f}"),
        "learner idle": number_or_dash(progress.idle_fraction, "{:.0%}"),
        "actors": wanted_actors(view),
        **({} if view.hosts is None else {"hosts": str(view.hosts)}),
        **({} if progress.cost is None else {"cost": f"{progress.cost:,.2f}"}),
        "left": "-" if progress.eta_s is None else duration(progress.eta_s),
    }


def held_out_figures(progress: Progress) -> dict[str, str]:
    """Write the score of held-out answers under its name, and their reward where it is another."""
    newest = progress.held_out
    if newest is None:
        return {"held out": "-"}
    figures = {newest.label: f"{newest.score:.3f}"}
    return figures | ({} if newest.reward is None else {"held-out reward": f"{newest.reward:.3f}"})


def until_the_batch(view: View) -> list[str]:
    """Write how far a session's first batch is; empty before any token and once it is trained."""
    heard = [actor for actor in view.actors if actor.samples(view.silent_after_s)]
    tokens, in_flight, finished = (
        sum(actor.figure(name) for actor in heard) for name in ("tokens", "in_flight", "finished")
    )
    if view.is_training or not tokens:
        return []
    parts = [
        f"{tokens:,.0f} tokens sampled",
        f"{finished:,.0f} episodes finished",
        f"{in_flight:,.0f} in flight",
    ]
    fill = view.fill
    if fill is not None and fill.batch:
        complete = min(fill.batch, fill.waiting + fill.claimed)
        parts.insert(0, f"{complete} of {fill.batch} groups complete")
    return parts


def wanted_actors(view: View) -> str:
    """Write the number of actors, and the number that the run wants where it differs."""
    alive, wanted = view.actors_alive, view.progress.actors_wanted
    there = "-" if alive is None else str(alive)
    return there if wanted in {None, alive} else f"{there} ({wanted} wanted)"


def end_of(actor: ActorSeen) -> str:
    """Write how an actor that is no longer present ended."""
    return "drained and left" if actor.has_left else "died or fell silent"


def duration(seconds: float) -> str:
    """Write a time span: `42 s`, `3:05 min`, `2:10 h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02d} h"


def number_or_dash(value: float | None, form: str) -> str:
    """Write a number in a given form; a dash where there is none."""
    return "-" if value is None else form.format(value)
