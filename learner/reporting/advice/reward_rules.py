"""Rules about rewards: constant, without variance, unread, failing, or different by actor.

Their arguments and results are those of a `Conclusion` (`evidence.py`).
"""

from __future__ import annotations

import math

from configs.settings import Settings
from configs.tables.run import UNIFORM

from .evidence import Window, total

FAILING, FAILING_NO_MORE = 0.05, 0.02  # retries hide a rare failure; one in twenty is a fault
UNREAD, UNREAD_NO_MORE = 0.5, 0.3
FLAT, FLAT_NO_MORE = 0.8, 0.6
SOLVED = 0.9  # of the best reward: groups without variance are what success looks like
FAR_APART, APART_NO_MORE = 0.5, 0.3  # standard deviations between an actor and the others
NEARBY = 2  # batches before and behind
FEWEST_GROUPS = 8
SIGNIFICANT = 4.0  # standard errors: once in ten thousand looks, and looks overlap
SHOWN = 200  # characters of an exception


def reward_failing(window: Window, settings: Settings, holds_already: bool) -> str | None:
    """Find rewards or environments that raise."""
    recent = window.last(10)
    failures = recent[-1].store.data_failures - recent[0].store.data_failures
    judged = failures + total(recent[1:], lambda batch: batch.episodes)
    share = failures / judged if judged else 0.0
    if failures < 5 or share <= (FAILING_NO_MORE if holds_already else FAILING):
        return None
    reward = settings.run.reward
    what = (
        f"run.reward, now {reward}," if reward else f"run.environment, {settings.run.environment},"
    )
    return (
        f"{what} failed {failures} times in {judged} attempts ({share:.0%}), the last time with: "
        f"{_shortened(recent[-1].store.data_failure)}; mend that line and try it with "
        f"`nyala env test`"
    )


def answers_not_read(window: Window, settings: Settings, holds_already: bool) -> str | None:
    """Find answers that the scorer cannot read, which score 0 whatever they say."""
    judged = [batch for batch in window.last(5) if batch.unparsed is not None]
    if not judged:
        return None
    share = sum(batch.unparsed or 0.0 for batch in judged) / len(judged)
    if share <= (UNREAD_NO_MORE if holds_already else UNREAD):
        return None
    scorer = settings.run.environment_settings.get("scorer")
    return (
        f"the scorer found no answer in {share:.0%} of the completions of the last {len(judged)} "
        f"batches, and they count 0 whatever they say; ask for the form that it reads in "
        f"run.system_prompt or the dataset's prompt, or change run.environment_settings.scorer "
        f"(now {scorer or 'the default'}): `nyala samples {settings.run.folder} --worst`"
    )


def reward_constant(window: Window, settings: Settings, holds_already: bool) -> str | None:  # noqa: ARG001 - no milder constancy
    """Find a reward that is the same whatever the policy does, where no teacher is learned from."""
    if settings.algorithm.has_teacher:
        return None
    recent = window.last(5)
    lowest = min(batch.reward_min for batch in recent)
    highest = max(batch.reward_max for batch in recent)
    if lowest != highest:
        return None
    episodes = total(recent, lambda batch: batch.episodes)
    parts = ", ".join(sorted({part for batch in recent for part in batch.varying_parts}))
    judge = settings.run.reward or f"the score of {settings.run.environment}"
    if parts and settings.rewards.weights:
        why = (
            f"although its parts differ ({parts}): give those that count a weight in "
            f"rewards.weights (now {settings.rewards.weights})"
        )
    elif parts:
        why = (
            f"although its parts differ ({parts}): {judge} (run.reward) does not see it; try it on "
            f"right and wrong answers with `nyala env test`"
        )
    elif highest == window.best_reward > 0:
        why = (
            f"the best so far: its questions are solved, or {judge} rewards everything; take "
            f"harder questions for run.environment (now {settings.run.environment})"
        )
    else:
        why = (
            f"so there is nothing to learn from: {judge} judges no answer better than another; "
            f"look at answers with `nyala samples {settings.run.folder}`, at right ones with "
            f"`nyala env test`, and give credit for partly right ones or start from a stronger "
            f"run.model (now {settings.run.model})"
        )
    return f"all of the last {episodes:.0f} episodes had reward {highest:g}, {why}"


def groups_flat(window: Window, settings: Settings, holds_already: bool) -> str | None:
    """Find groups whose answers all get the same reward, and hence train nothing."""
    if settings.algorithm.has_teacher:
        return None
    recent = window.last(10)
    filtered = total(recent, lambda batch: batch.filtered_groups)
    groups = total(recent, lambda batch: batch.groups) + filtered
    share = (total(recent, lambda batch: batch.zero_variance_groups) + filtered) / groups
    mean = total(recent, lambda batch: batch.reward_mean) / len(recent)
    is_solved = mean >= SOLVED * window.best_reward > 0
    if is_solved or share <= (FLAT_NO_MORE if holds_already else FLAT):
        return None
    run = settings.run
    lowest = min(batch.reward_min for batch in recent)
    is_easy = mean - lowest > (window.best_reward - lowest) / 2
    remedy = (
        "the questions are too easy: take harder ones, or set algorithm.filter_zero_variance: true"
        if is_easy
        else "the questions are too hard: take easier ones, give credit for partly right answers"
    )
    if run.sampler == UNIFORM:
        remedy += ", set run.sampler to difficulty where some prompts are between"
    return (
        f"in {share:.0%} of the last {groups:.0f} groups all answers had the same reward, and they "
        f"train nothing; at a mean reward of {mean:.3g} {remedy}, or raise run.group_size (now "
        f"{run.group_size})"
    )


def actor_unlike_others(window: Window, settings: Settings, holds_already: bool) -> str | None:
    """Find an actor whose rewards are much lower than the others' at the same time."""
    unlike = []
    for name in window.newest.actors:
        difference, error, spread, groups = _against_others(window, name)
        if not spread:
            continue
        apart = -difference / spread
        if (
            apart > (APART_NO_MORE if holds_already else FAR_APART)
            and -difference > SIGNIFICANT * error
        ):
            unlike.append((apart, name, -difference, groups))
    if not unlike:
        return None
    _, name, difference, groups = max(unlike)
    return (
        f"the rewards of {name} are {difference:.2g} below those of the other actors at the same "
        f"time ({groups} groups): its answers or its judge are not theirs; look at `nyala "
        f"samples {settings.run.folder} --actor {name}`, compare its machine, packages and "
        f"actors.engine_args (now {settings.actors.engine_args or '{}'}), and stop it"
    )


def _against_others(window: Window, name: str) -> tuple[float, float, float, int]:
    """Compare with batches nearby, as rewards rise, and one actor may have made a whole batch.

    Returns:
        The difference of an actor's mean reward from the others', its standard error (of groups as
        wholes, for their episodes are alike), the spread of rewards, and the actor's groups.
    """
    recent = window.last(20)
    difference, own_groups = 0.0, 0
    for at, batch in enumerate(recent):
        actor = batch.actors.get(name)
        nearby = recent[max(0, at - NEARBY) : at + NEARBY + 1]
        others = [share for one in nearby for who, share in one.actors.items() if who != name]
        if actor is not None and others:
            theirs = sum(share.groups for share in others)
            mean = sum(share.reward * share.groups for share in others) / theirs
            difference += actor.groups * (actor.reward - mean)
            own_groups += actor.groups
    all_groups = sum(share.groups for batch in recent for share in batch.actors.values())
    if own_groups < FEWEST_GROUPS or all_groups - own_groups < FEWEST_GROUPS:
        return 0.0, 0.0, 0.0, 0
    spread = math.sqrt(total(recent, lambda batch: batch.reward_std**2) / len(recent))
    error = spread * math.sqrt(1 / own_groups + 1 / (all_groups - own_groups))
    return difference / own_groups, error, spread, own_groups


def _shortened(text: str) -> str:
    """Shorten an error to its message and the place at its end."""
    line = " ".join(text.split()) or "no reason given"
    return line if len(line) <= SHOWN else f"{line[: SHOWN // 2]} ... {line[-SHOWN // 2 :]}"
