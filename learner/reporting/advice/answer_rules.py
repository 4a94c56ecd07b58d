"""Rules about how answers begin and end: prompt template, stop token, length, temperature.

Their arguments and results are those of a `Conclusion` (`evidence.py`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from configs.settings import Settings

from .evidence import EndShare, Evidence, Window, middle, total

OPEN, OPEN_NO_MORE = 0.5, 0.3
PAST, PAST_NO_MORE = 0.3, 0.15
CUT, CUT_NO_MORE = 0.5, 0.35
COLD = 0.3  # below it, one token has nearly all of the probability whatever the model has learnt
SURE = 0.05  # nats per token
ALIKE = 0.5
WARM = 0.3  # a temperature that is not to be lowered any more
HOT, HOT_NO_MORE = 1.0, 0.5  # standard deviations of sampled rewards below greedy ones


def prompt_left_open(window: Window, settings: Settings, holds_already: bool) -> str | None:
    """Find prompts that end where a turn ends: the template gave the policy no turn."""
    recent = window.last(5)
    groups = total(recent, lambda batch: batch.groups)
    share = total(recent, lambda batch: batch.open_prompts) / groups
    if share <= (OPEN_NO_MORE if holds_already else OPEN):
        return None
    return (
        f"{share:.0%} of the last {groups:.0f} prompts end with the token that ends a turn, so the "
        f"policy is not asked to answer: the chat template of run.model (now {settings.run.model}) "
        f"has no generation prompt; take the template of the model's own release, with "
        f"`{{% if add_generation_prompt %}}`"
    )


def stop_token_ignored(window: Window, settings: Settings, holds_already: bool) -> str | None:
    """Find answers that go on behind a special token: no end token, although it is meant as one."""
    recent = window.last(5)
    episodes = total(recent, lambda batch: batch.episodes)
    counts: Counter[str] = Counter()
    for batch in recent:
        counts.update(batch.run_past)
    if not counts:
        return None
    token, answers = counts.most_common(1)[0]
    share = answers / episodes
    if share <= (PAST_NO_MORE if holds_already else PAST):
        return None
    stop = list(settings.run.stop)
    return (
        f"{share:.0%} of the last {episodes:.0f} answers have the special token {token} in their "
        f"middle and go on behind it: it ends no turn here; make it the eos_token of run.model's "
        f"tokenizer or generation_config.json, or add it to run.stop (now {stop})"
    )


def answers_cut_off(window: Window, settings: Settings, holds_already: bool) -> str | None:
    """Find a limit that most answers run into."""
    recent = window.last(5)
    episodes = total(recent, lambda batch: batch.episodes)
    share = total(recent, lambda e: e.response_truncated_fraction * e.episodes) / episodes
    if share <= (CUT_NO_MORE if holds_already else CUT):
        return None
    run = settings.run
    length = middle(recent, lambda batch: batch.response_length_mean)
    return (
        f"{share:.0%} of the last {episodes:.0f} answers were cut off (mean length {length:.0f} "
        f"tokens): raise run.max_completion_tokens (now {run.max_completion_tokens}), or if `nyala "
        f"samples {run.folder} --finish length` shows answers that are complete long before, mend "
        f"what should end them: the model's end token or run.stop (now {list(run.stop)})"
    )


def temperature_low(window: Window, settings: Settings, holds_already: bool) -> str | None:
    """Find a temperature at which all answers to a prompt are the same."""
    temperature, recent = settings.run.temperature, window.last(5)
    groups = total(recent, lambda batch: batch.groups)
    alike = total(recent, lambda batch: batch.zero_variance_groups) / groups
    entropy = middle(recent, lambda batch: batch.entropy)
    if temperature >= COLD or not (alike > ALIKE or entropy < SURE or holds_already):
        return None
    return (
        f"at run.temperature {temperature:g} the policy has {entropy:.2g} nats of entropy per "
        f"token and {alike:.0%} of the last {groups:.0f} groups had equal rewards: answers to a "
        f"prompt hardly differ, and none is better than another; set run.temperature to 1.0"
    )


def temperature_high(window: Window, settings: Settings, holds_already: bool) -> str | None:
    """Find a temperature at which sampled answers are far worse than the model's likeliest ones."""
    first = window.first
    greedy = window.newest.greedy_reward
    temperature = settings.run.temperature
    if greedy is None or temperature <= WARM:
        return None
    episodes = total(first, lambda batch: batch.episodes)
    sampled = total(first, lambda batch: batch.reward_mean * batch.episodes) / episodes
    recent = window.last(5)
    newest = middle(recent, lambda batch: batch.reward_mean)
    apart = (HOT_NO_MORE if holds_already else HOT) * middle(first, lambda batch: batch.reward_std)
    # A difference that training has made up for needs no other temperature.
    if apart <= 0 or greedy - sampled <= apart or greedy - newest <= apart:
        return None
    return (
        f"greedy answers had a mean reward of {greedy:.2g} at the first evaluation, those sampled "
        f"in the first {len(first)} batches {sampled:.2g}, with "
        f"{middle(first, lambda batch: batch.entropy):.2g} nats of entropy per token: the policy "
        f"knows more than it samples, and few groups tell right from wrong; lower run.temperature "
        f"(now {temperature:g})"
    )


# --------------------------------------------------------------------------------------------------
# A rule about strings of `run.stop` that end answers too early.

BLANK, BLANK_NO_MORE = 0.3, 0.15  # of all answers
MOST, MOST_NO_MORE = (
    0.5,
    0.3,
)  # of all answers end at the string, and of those the scorer reads none
WORSE, WORSE_NO_MORE = 0.5, 0.3  # standard deviations of rewards
SOME = 0.05  # of all answers: what is rarer costs little
SIGNIFICANT = 4.0  # standard errors: once in ten thousand looks, and looks overlap
OWN_END = ""  # a token of the model


def stop_string_early(window: Window, settings: Settings, holds_already: bool) -> str | None:
    """Find a string that leaves answers empty, unread, or worse than those that end otherwise."""
    recent = window.last(20)
    episodes = total(recent, lambda batch: batch.episodes)
    run = settings.run
    for string in run.stop:
        ended = [batch.ends[string] for batch in recent if string in batch.ends]
        why = (
            _is_blank(ended, episodes, holds_already)
            or _is_unread(ended, episodes, holds_already)
            or _is_worse(string, recent, episodes, holds_already)
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


def _is_blank(ended: Sequence[EndShare], episodes: float, holds_already: bool) -> str | None:
    blank = sum(share.blank for share in ended)
    if blank <= (BLANK_NO_MORE if holds_already else BLANK) * episodes:
        return None
    return f"{blank} of those say nothing before it"


def _is_unread(ended: Sequence[EndShare], episodes: float, holds_already: bool) -> str | None:
    most, count = MOST_NO_MORE if holds_already else MOST, sum(share.episodes for share in ended)
    unread = sum(share.unread for share in ended)
    if count <= most * episodes or unread <= most * count:
        return None
    return f"the scorer found no answer in {unread} of those"


def _is_worse(
    string: str, recent: Sequence[Evidence], episodes: float, holds_already: bool
) -> str | None:
    """Compare answers within batches, as rewards rise from batch to batch."""
    difference, weight = 0.0, 0.0
    for batch in recent:
        by_string, by_itself = batch.ends.get(string), batch.ends.get(OWN_END)
        if by_string is not None and by_itself is not None:
            both = by_string.episodes * by_itself.episodes
            weights = both / (by_string.episodes + by_itself.episodes)
            difference += weights * (by_itself.reward - by_string.reward)
            weight += weights
    spread = math.sqrt(total(recent, lambda batch: batch.reward_std**2) / len(recent))
    count = total(recent, lambda batch: batch.ends[string].episodes if string in batch.ends else 0)
    if not weight or not spread or count <= SOME * episodes:
        return None
    worse = difference / weight
    apart = (WORSE_NO_MORE if holds_already else WORSE) * spread
    if worse <= max(apart, SIGNIFICANT * spread / math.sqrt(weight)):
        return None
    return f"their rewards are {worse:.2g} below those of answers that the model ended itself"


def _share(ended: Sequence[EndShare], episodes: float) -> float:
    return sum(share.episodes for share in ended) / episodes
