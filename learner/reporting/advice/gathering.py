"""Evidence of a batch from its episodes: counts, in a few passes over arrays.

Called by the advisor's thread.

Shapes: N tokens of all completions behind each other, B episodes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from buffer.record.episode import Episode
from learner.reporting.metrics import BatchFigures

from .evidence import ActorShare, EndShare, Evidence

UNREAD_METRICS = ("unparsed", "scorer_errors")
"""Metrics of our environments: 1 where the scorer found nothing to judge."""
MOST_BLANKS = 8  # tokens of white space before the end of an answer that says nothing


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens that mean more to the model than text."""

    special: Mapping[int, str]
    """Id -> how it is written."""
    end: int | None
    """The token that ends a sequence."""
    is_blank: Callable[[int], bool]
    """Whether a token is white space."""
    stop: Sequence[str] = ()
    """Strings that end a turn: `run.stop`."""
    decode: Callable[[Sequence[int]], str] = lambda _: ""
    """The text of tokens, without special ones: `<eos>` has no `e`."""


NO_VOCABULARY = Vocabulary({}, None, lambda _: False)


def evidence_of(
    step: int, episodes: Sequence[Episode], figures: BatchFigures, vocabulary: Vocabulary
) -> Evidence:
    """Count what only rules need, beside the figures that every batch has.

    Args:
        step: Number of the batch.
        episodes: All episodes of the batch, at least one.
        figures: Figures of the batch, as in its line of metrics.
        vocabulary: Vocabulary of the model.
    """
    return Evidence(
        step=step,
        episodes=figures.episodes,
        groups=figures.groups,
        reward_mean=figures.reward_mean,
        reward_min=min(episode.reward for episode in episodes),
        reward_max=max(episode.reward for episode in episodes),
        reward_std=figures.reward_std,
        varying_parts=_varying_parts(episodes),
        zero_variance_groups=figures.zero_variance_groups,
        response_truncated_fraction=figures.response_truncated_fraction,
        unparsed=_unread(episodes),
        response_length_mean=figures.response_length_mean,
        actors=_actor_shares(episodes),
        run_past=_run_past(episodes, vocabulary),
        ends=_ends(episodes, vocabulary) if vocabulary.stop else {},
        open_prompts=_open_prompts(episodes, vocabulary),
        policy_lag_mean=figures.policy_lag_mean,
    )


def _varying_parts(episodes: Sequence[Episode]) -> tuple[str, ...]:
    values: defaultdict[str, set[float]] = defaultdict(set)
    for episode in episodes:
        for name, value in episode.reward_parts.items():
            values[name].add(value)
    return tuple(sorted(name for name, seen in values.items() if len(seen) > 1))


def _unread(episodes: Sequence[Episode]) -> float | None:
    counted = [
        _is_unread(episode)
        for episode in episodes
        if not episode.environment_metrics.keys().isdisjoint(UNREAD_METRICS)
    ]
    return sum(counted) / len(counted) if counted else None


def _is_unread(episode: Episode) -> float:
    return max(episode.environment_metrics.get(name, 0.0) for name in UNREAD_METRICS)


def _actor_shares(episodes: Sequence[Episode]) -> dict[str, ActorShare]:
    by_actor: defaultdict[str, list[Episode]] = defaultdict(list)
    for episode in episodes:
        by_actor[episode.incarnation].append(episode)
    return {
        name: ActorShare(
            episodes=len(members),
            groups=len({episode.group_id for episode in members}),
            reward=sum(episode.reward for episode in members) / len(members),
            s_per_token=sum(map(_s_per_token, members)) / len(members),
        )
        for name, members in by_actor.items()
    }


def _s_per_token(episode: Episode) -> float:
    return (episode.finished_at - episode.started_at) / max(1, len(episode.completion.token_ids))


def _run_past(episodes: Sequence[Episode], vocabulary: Vocabulary) -> dict[str, int]:
    """Count the answers in which the policy goes on behind a special token, by token."""
    if not vocabulary.special:
        return {}
    tokens_N = np.concatenate([episode.completion.token_ids for episode in episodes])
    mask_N = np.concatenate([episode.completion.loss_mask for episode in episodes]).astype(bool)
    lengths_B = np.array([len(episode.completion.token_ids) for episode in episodes])
    goes_on_N = np.append(mask_N[1:], False)
    goes_on_N[np.cumsum(lengths_B)[lengths_B > 0] - 1] = False
    firsts = zip((np.cumsum(lengths_B) - lengths_B).tolist(), episodes, strict=True)
    for first, episode in firsts:
        for branch in episode.completion.branches:
            goes_on_N[first + branch.start - 1] = False
    special_N = np.isin(tokens_N, np.fromiter(vocabulary.special, dtype=np.int32))
    (places,) = np.nonzero(special_N & mask_N & goes_on_N)
    owners = np.repeat(np.arange(len(episodes)), lengths_B)[places]
    pairs = set(zip(owners.tolist(), tokens_N[places].tolist(), strict=True))
    return dict(Counter(vocabulary.special[token] for _, token in pairs))


def _ends(episodes: Sequence[Episode], vocabulary: Vocabulary) -> dict[str, EndShare]:
    """Divide the answers that were not cut off by what ended their last turn."""
    by_end: defaultdict[str, list[tuple[Episode, bool]]] = defaultdict(list)
    for episode in episodes:
        if episode.finish_reason != "length":
            end, is_blank = _end_of(_last_turn(episode), vocabulary)
            by_end[end].append((episode, is_blank))
    return {
        end: EndShare(
            episodes=len(answers),
            reward=sum(episode.reward for episode, _ in answers) / len(answers),
            blank=sum(is_blank for _, is_blank in answers),
            unread=sum(_is_unread(episode) > 0 for episode, _ in answers),
        )
        for end, answers in by_end.items()
    }


def _last_turn(episode: Episode) -> list[int]:
    completion = episode.completion
    (written,) = np.nonzero(completion.loss_mask == 0)  # by the environment
    begin = int(written[-1]) + 1 if len(written) else 0
    begin = max([begin, *(branch.start for branch in completion.branches)])
    return [int(token) for token in completion.token_ids[begin:]]


def _end_of(turn: list[int], vocabulary: Vocabulary) -> tuple[str, bool]:
    """Find the string of `run.stop` that a turn ends with, and whether there is text before it."""
    # A token has a character or more, except where several make one.
    enough = max(map(len, vocabulary.stop)) + MOST_BLANKS
    text = vocabulary.decode(turn[-enough:])
    strings = [stop for stop in vocabulary.stop if stop in text]
    if not strings:
        return "", False
    end = min(strings, key=text.index)
    return end, len(turn) <= enough and not text.partition(end)[0].strip()


def _open_prompts(episodes: Sequence[Episode], vocabulary: Vocabulary) -> int:
    """Count the groups whose prompt has only white space behind a token that ends a turn."""
    ended = (e.completion.token_ids for e in episodes if e.finish_reason == "stop")
    ends = {int(token_ids[-1]) for token_ids in ended if len(token_ids)} & vocabulary.special.keys()
    if vocabulary.end is not None:
        ends.add(vocabulary.end)
    lasts = {episode.group_id: episode.prompt_ids[-2:].tolist() for episode in episodes}
    return sum(_is_open(last, ends, vocabulary) for last in lasts.values())


def _is_open(last: list[int], ends: set[int], vocabulary: Vocabulary) -> bool:
    if not last:
        return False
    if len(last) == 2 and last[0] in ends and vocabulary.is_blank(last[1]):
        return True
    return last[-1] in ends
