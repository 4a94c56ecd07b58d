"""Episodes with branches, and the same written out: a row a path, each token trained once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import torch

from buffer.record.episode import Branch, Episode
from learner.algorithm.microbatch import Microbatch
from tests.learner.support.made_episodes import make_episode


def random_branches(
    random: np.random.Generator, length: int, *, most: int = 5
) -> tuple[Branch, ...]:
    """Draw branches of a log: some leave it in the middle, some at an end, some are roots."""
    if length < 2:
        return ()
    number = int(random.integers(1, min(most, length - 1) + 1))
    starts = sorted(random.choice(np.arange(1, length), size=number, replace=False).tolist())
    return tuple(
        Branch(start, None if random.random() < 0.25 else int(random.integers(0, start)))
        for start in starts
    )


def random_branched_episodes(number: int, *, seed: int = 0, vocabulary: int = 48) -> list[Episode]:
    """Make pairs of episodes with one prompt, most of them with branches."""
    random = np.random.default_rng(seed)
    episodes = []
    prompt: list[int] = []
    for task_id in range(number):
        if task_id % 2 == 0:
            prompt = random.integers(3, vocabulary, size=random.integers(1, 5)).tolist()
        length = int(random.integers(2, 16))
        branches = () if task_id % 5 == 4 else random_branches(random, length)
        mask = [1, *random.integers(0, 2, size=length - 1).tolist()]
        for start, parent in branches:
            mask[start] = 0 if parent is None else mask[start]
        episode = make_episode(
            task_id,
            group_id=task_id // 2,
            prompt=prompt,
            completion=random.integers(3, vocabulary, size=length).tolist(),
            logprobs=(random.uniform(-4, -2, size=length) * np.array(mask)).tolist(),
            mask=mask,
            reward=float(random.uniform()),
            branches=branches,
        )
        episodes.append(episode)
    return episodes


def before(episode: Episode) -> list[int | None]:
    """List the token of the log that each one follows: -1 = the prompt, None = nothing."""
    log: list[int | None] = [*range(-1, len(episode.completion.token_ids) - 1)]
    for start, parent in episode.completion.branches:
        log[start] = None if parent is None else parent - 1
    return log


def path_to(episode: Episode, token: int) -> tuple[list[int], bool]:
    """Return the tokens of the log up to one along its path, and whether the prompt is before."""
    follows = before(episode)
    path = [token]
    while (previous := follows[path[-1]]) is not None and previous >= 0:
        path.append(previous)
    return path[::-1], previous is not None


def written_out(episode: Episode) -> list[Episode]:
    """Make a row of each path; a token is trained in the first row that has it."""
    completion, follows = episode.completion, before(episode)
    rows: list[Episode] = []
    trained: set[int] = set()
    for token in range(len(follows)):
        if token in follows:
            continue  # the path goes on
        path, is_prompted = path_to(episode, token)
        mask = [int(completion.loss_mask[t]) if t not in trained else 0 for t in path]
        trained |= set(path)
        ids, logprobs = completion.token_ids[path], completion.behaviour_logprobs[path]
        prompt = episode.prompt_ids
        if not is_prompted:  # its first token takes the prompt's place
            prompt, ids, logprobs, mask = ids[:1], ids[1:], logprobs[1:], mask[1:]
        row = make_episode(
            1000 * episode.task_id + len(rows),
            group_id=episode.group_id,
            prompt=prompt.tolist(),
            completion=ids.tolist(),
            logprobs=(logprobs * np.array(mask, dtype=np.float32)).tolist(),
            mask=mask,
            reward=episode.reward,
        )
        rows += [row] if sum(mask) else []
    return rows


Facts = tuple[tuple[int, ...], int, int, float]
"""Of a trained token: all ids up to it, its position, the id before it, its log-prob."""


def tokens_to_train(episode: Episode) -> Iterator[Facts]:
    """Yield what each sampled token of a log must be trained as."""
    for token in np.flatnonzero(episode.completion.loss_mask).tolist():
        path, is_prompted = path_to(episode, token)
        ids = episode.completion.token_ids[path].tolist()
        ids = [*episode.prompt_ids.tolist(), *ids] if is_prompted else ids
        logprob = float(episode.completion.behaviour_logprobs[token])
        yield tuple(ids), len(ids) - 1, ids[-2], logprob


def trained_tokens(microbatch: Microbatch) -> Counter[Facts]:
    """Count what a microbatch trains."""
    sequences = microbatch.sequences
    ids, seen = sequences.token_ids_T, sequences.seen
    parts = None if seen is None else seen.places.split(list(seen.lengths))
    numbers = torch.bucketize(microbatch.indices_N, sequences.bounds, right=True) - 1
    found: Counter[Facts] = Counter()
    for place, number, logprob in zip(
        microbatch.indices_N.tolist(),
        numbers.tolist(),
        microbatch.behaviour_logprobs_N.tolist(),
        strict=True,
    ):
        begin = int(sequences.bounds[number])
        if parts is None:
            before = ids[begin : place + 1]
        else:  # what its sequence attends to ends with the sequence's own tokens
            num_later = sequences.lengths[number] - (place + 1 - begin)
            before = ids[parts[number][: len(parts[number]) - num_later]]
        followed = int(ids[sequences.before_T[place]])
        found[tuple(before.tolist()), int(sequences.positions_T[place]), followed, logprob] += 1
    return found
