"""A rule about strings of `run.stop` that end answers before they say what they were to say."""

from __future__ import annotations

import math
from collections.abc import Sequence

from configs.settings import Settings

from .evidence import EndShare, Evidence
from .window import Window, total

BLANK, BLANK_NO_MORE = 0.3, 0.15  # of all answers
MOST, MOST_NO_MORE = (
    0.5,
    0.3,
)  # of all answers end at the string, and of those the scorer reads none
WORSE, WORSE_NO_MORE = 0.5, 0.3  # standard deviations of rewards
SOME = 0.05  # of all answers: what is rarer costs little
SIGNIFICANT = 4.0  # standard errors: once in ten thousand looks, and looks overlap
OWN_END = ""  # a token of the model


def stop_string_early(window: Window, settings: Settings, holds: bool) -> str | None:
    """Find a string that leaves answers empty, unread, or worse than those that end otherwise."""
    recent = window.last(20)
    episodes = total(recent, lambda each: each.episodes)
    run = settings.run
    for string in run.stop:
        ended = [each.ends[string] for each in recent if string in each.ends]
        why = (
            _is_blank(ended, episodes, holds)
            or _is_unread(ended, episodes, holds)
            or _is_worse(string, recent, episodes, holds)
        )
        if why:
            return (
                f"the string {string!r} of run.stop (now {list(run.stop)}) seems to end answers "
                f"too early: it ended {_share(ended, episodes):.0%} of the last {episodes:.0f}, "
                f"and {why}; the text that is judged ends before it: read `nyala samples "
                f"{run.folder} --worst`, and take the string out of run.stop, or choose one that "
                f"no answer needs"
            )
    return None


def _is_blank(ended: Sequence[EndShare], episodes: float, holds: bool) -> str | None:
    blank = sum(each.blank for each in ended)
    if blank <= (BLANK_NO_MORE if holds else BLANK) * episodes:
        return None
    return f"{blank} of those say nothing before it"


def _is_unread(ended: Sequence[EndShare], episodes: float, holds: bool) -> str | None:
    most, count = MOST_NO_MORE if holds else MOST, sum(each.episodes for each in ended)
    unread = sum(each.unread for each in ended)
    if count <= most * episodes or unread <= most * count:
        return None
    return f"the scorer found no answer in {unread} of those"


def _is_worse(string: str, recent: Sequence[Evidence], episodes: float, holds: bool) -> str | None:
    """Compare within batches, as rewards rise."""
    difference, weight = 0.0, 0.0
    for each in recent:
        by_string, by_itself = each.ends.get(string), each.ends.get(OWN_END)
        if by_string is not None and by_itself is not None:
            both = by_string.episodes * by_itself.episodes
            weights = both / (by_string.episodes + by_itself.episodes)
            difference += weights * (by_itself.reward - by_string.reward)
            weight += weights
    spread = math.sqrt(total(recent, lambda each: each.reward_std**2) / len(recent))
    count = total(recent, lambda each: each.ends[string].episodes if string in each.ends else 0)
    if not weight or not spread or count <= SOME * episodes:
        return None
    worse = difference / weight
    apart = (WORSE_NO_MORE if holds else WORSE) * spread
    if worse <= max(apart, SIGNIFICANT * spread / math.sqrt(weight)):
        return None
    return f"their rewards are {worse:.2g} below those of answers that the model ended itself"


def _share(ended: Sequence[EndShare], episodes: float) -> float:
    return sum(each.episodes for each in ended) / episodes
