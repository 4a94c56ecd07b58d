"""Rules about flow: who waits for whom, what is dropped or dies, actors that are slow.

Their arguments and results are those of a `Conclusion` (`evidence.py`).
"""

from __future__ import annotations

from collections import Counter
from statistics import median

from configs.fleet import actors_to_feed, bounds_on_actors
from configs.settings import Settings

from .evidence import Evidence, Window, total

IDLE, IDLE_NO_MORE = 0.25, 0.15
WORKLESS, WORKLESS_NO_MORE = 0.9, 0.7
FEW_LOOKS, LOOKS = 5, 30  # ten seconds are in fifty batches of 0.2 s; a minute is enough
DROPPED, DROPPED_NO_MORE = 0.02, 0.01
# Where actors work in step, whatever holds one up drops all of its groups at once: sixteen at a
# time on the demo, in one batch of twelve. Answers that take too long drop some in nearly every.
DROPPING, DROPPING_NO_MORE = 0.25, 0.15
MASKED, MASKED_NO_MORE = 0.5, 0.4
FILTERED = "zero_variance"  # made way on purpose
SLOWER = 1.1
ALMOST_ALWAYS, OFTEN = 18, 14  # of 20 batches
DYING = 5


def leasing_paused(window: Window, settings: Settings, holds_already: bool) -> str | None:  # noqa: ARG001 - it is, or is not
    """Find a run that gives no work, and hence may train nothing more."""
    if not window.store.paused:
        return None
    broker, folder = settings.broker, settings.run.folder
    return (
        f"no task is given to actors any more, because {window.store.paused}: mend that, try it "
        f"with `nyala env test`, and go on with `nyala buffer resume {folder}`; `nyala buffer dead "
        f"list {folder}` has all of them (a task dies of broker.max_data_failures, now "
        f"{broker.max_data_failures}, errors of its own, or broker.max_attempts, now "
        f"{broker.max_attempts}, lost actors)"
    )


def dead_letters_grow(window: Window, settings: Settings, holds_already: bool) -> str | None:
    """Find tasks that fail on every actor."""
    recent = window.last(20)
    died = recent[-1].store.dead - recent[0].store.dead
    if died < (1 if holds_already else DYING):
        return None
    why = " ".join(recent[-1].store.death.split())[:200] or "no reason given"
    return (
        f"{died} tasks died in the last {len(recent)} batches ({recent[-1].store.dead} in all), "
        f"the last of: {why}; mend that, list them with `nyala buffer dead list "
        f"{settings.run.folder}`, and try them again with `nyala buffer dead requeue`, or allow "
        f"more failures with broker.max_data_failures (now {settings.broker.max_data_failures})"
    )


def groups_dropped(window: Window, settings: Settings, holds_already: bool) -> str | None:
    """Find a share of groups that is made and never trained, batch after batch."""
    counts: Counter[str] = Counter()
    batches = 0
    for batch in window:
        lost = {why: n for why, n in batch.dropped.items() if n and why != FILTERED}
        counts.update(lost)
        batches += bool(lost)
    dropped = counts.total()
    share = dropped / (dropped + total(list(window), lambda batch: batch.groups))
    often = batches / len(window) > (DROPPING_NO_MORE if holds_already else DROPPING)
    if not often or share <= (DROPPED_NO_MORE if holds_already else DROPPED):
        return None
    reason, run = counts.most_common(1)[0][0], settings.run
    on_stale = settings.buffer.on_stale
    other = "mask" if on_stale == "drop" else "train"
    remedy = (
        f"raise run.max_policy_lag (now {run.max_policy_lag}), set buffer.on_stale: {other} (now "
        f"{on_stale}), or shorten the longest answers: run.max_completion_tokens (now "
        f"{run.max_completion_tokens})"
        if reason == "stale"
        else "the learner's log has the cause of each"
    )
    return (
        f"{share:.1%} of the groups that the last {len(window)} batches were made of were dropped, "
        f"in {batches} of them, most as {reason}: {remedy}"
    )


def tokens_masked(window: Window, settings: Settings, holds_already: bool) -> str | None:
    """Find a run of whose sampled tokens most are too old to be trained."""
    recent = window.last(20)
    share = total(recent, lambda batch: batch.masked) / len(recent)
    if share <= (MASKED_NO_MORE if holds_already else MASKED):
        return None
    run = settings.run
    return (
        f"{share:.0%} of the tokens that were sampled for the last {len(recent)} batches are "
        f"context only, because they were stale: raise run.max_policy_lag (now "
        f"{run.max_policy_lag}), set buffer.on_stale: train (now {settings.buffer.on_stale}), or "
        f"shorten the longest answers: run.max_completion_tokens (now {run.max_completion_tokens})"
    )


def learner_waits(window: Window, settings: Settings, holds_already: bool) -> str | None:
    """Find a learner that more actors would feed."""
    recent = window.last(20)
    span_s = total(recent, lambda batch: batch.span_s)
    share = total(recent, lambda batch: batch.wait_s) / span_s if span_s else 0.0
    if share <= (IDLE_NO_MORE if holds_already else IDLE):
        return None
    actors = max(1, recent[-1].store.actors)
    wanted = actors_to_feed(actors, span_s=span_s, least_s=(1 - share) * span_s)
    most, bound = min(bounds_on_actors(settings))
    # More would have no work, or would be refused.
    limit = f", of which no more than {most} can work, as {bound}" if wanted > most else ""
    at_a_time, fuller = settings.actors.max_concurrent_episodes, ""
    if at_a_time != "auto":
        now = at_a_time or "null"
        fuller = (
            f"more episodes at a time (actors.max_concurrent_episodes, now {now}: auto finds how "
            f"many), or "
        )
    return (
        f"the learner waited {share:.0%} of the time for episodes: {wanted} actors instead of "
        f"{actors} would feed it{limit}, where they have cores or cards of their own "
        f"(actors.count, now {settings.actors.count}); else {fuller}fewer tokens: "
        f"run.max_completion_tokens (now {settings.run.max_completion_tokens})"
    )


def actors_wait(window: Window, settings: Settings, holds_already: bool) -> str | None:
    """Find actors that have nothing to do, as the bound on policy lag is reached."""
    looks = workless = 0
    for batch in reversed(list(window)):
        looks, workless = looks + batch.looks, workless + batch.workless
        if looks >= LOOKS:
            break
    share = workless / max(1, looks)
    actors = window.newest.store.actors
    if (
        looks < FEW_LOOKS
        or not actors
        or share <= (WORKLESS_NO_MORE if holds_already else WORKLESS)
    ):
        return None
    return (
        f"no actor had work at {share:.0%} of the last {looks} looks, which do not wait for "
        f"batches: {'1 actor waits' if actors == 1 else f'{actors} actors wait'} for the learner; "
        f"{_quicker_learner(window.newest, settings, actors)}"
    )


def _quicker_learner(newest: Evidence, settings: Settings, actors: int) -> str:
    """Write what helps here when the learner is slower than its actors."""
    learner, ways = settings.learner, []
    if newest.cards > learner.ranks:
        ways.append(
            f"give it more ranks (learner.ranks, now {learner.ranks}, of {newest.cards} cards)"
        )
    if newest.cores > learner.ranks * learner.threads:
        ways.append(
            f"let it compute on more cores (learner.threads, now {learner.threads}, of "
            f"{newest.cores} cores)"
        )
    if actors > 1:
        ways.append(f"run fewer actors (actors.count, now {settings.actors.count})")
    tokens = (
        f"train fewer tokens (run.max_completion_tokens, now {settings.run.max_completion_tokens})"
    )
    return ", or ".join(ways or [tokens])


def actor_slow(window: Window, settings: Settings, holds_already: bool) -> str | None:
    """Find an actor that takes longer per token than the others, in nearly every batch."""
    slow = []
    for name in window.newest.actors:
        ratios = _ratios(window, name)
        slower = sum(ratio > SLOWER for ratio in ratios)
        if len(ratios) == 20 and slower >= (OFTEN if holds_already else ALMOST_ALWAYS):
            slow.append((median(ratios), name))
    if not slow:
        return None
    ratio, name = max(slow)
    way, at_a_time = "end it", settings.actors.max_concurrent_episodes
    if at_a_time != 1:
        now = at_a_time or "null"
        way = f"give it fewer episodes at a time: actors.max_concurrent_episodes (now {now})"
    return (
        f"{name} takes {ratio:.1f} times as long per token as the other actors; everybody waits "
        f"for its longest episodes: see what else its machine does, or {way}"
    )


def _ratios(window: Window, name: str) -> list[float]:
    """Divide an actor's seconds per token by the others', in batches that have both."""
    ratios = []
    for batch in window:
        actor = batch.actors.get(name)
        others = [share for other, share in batch.actors.items() if other != name]
        episodes = sum(share.episodes for share in others)
        theirs = sum(share.s_per_token * share.episodes for share in others)
        if actor is not None and theirs > 0:
            ratios.append(actor.s_per_token * episodes / theirs)
    return ratios[-20:]
