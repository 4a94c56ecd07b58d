"""Transcripts with branches: cut into chunks anywhere, and continued from what was stored."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from actors.episodes.maker import _partial
from actors.episodes.rollout import Transcript
from broker.protocol.messages import Lease, TaskSpec
from buffer.record.codec import (
    decode_completion,
    decode_episode,
    encode_completion,
    encode_episode,
    join_completions,
)
from buffer.record.episode import Branch, Completion, PolicyVersion, VersionSpan
from buffer.record.rules import EpisodeLimits
from configs.errors import RecordError
from tests.learner.support.made_branches import path_to
from tests.learner.support.made_episodes import make_episode

SPANS = (VersionSpan(PolicyVersion(1, 0), 0),)


def _step(transcript: Transcript, random: np.random.Generator, paths: list[list[int]]) -> None:
    """Say or hear some tokens, here or on another branch, and note the path of each."""
    length, path = len(transcript), paths[-1] if paths else []
    is_root = bool(length) and random.random() < 0.2
    if is_root:
        transcript.branch(None)
        path = []
    elif length and random.random() < 0.5:
        parent = int(random.integers(0, length + 1))
        transcript.branch(parent)
        path = paths[parent - 1] if parent else []
    count = int(random.integers(1, 4))
    token_ids = random.integers(3, 99, size=count).tolist()
    transcript.sign(1 + length, "actor")
    if length and (is_root or random.random() < 0.4):
        transcript.append_observation(token_ids)
    else:
        transcript.append_sampled(token_ids, [-1.0] * count, SPANS)
    for token in range(length, len(transcript)):
        path = [*path, token]
        paths.append(path)


@pytest.mark.parametrize("seed", range(20))
def test_a_transcript_is_stored_in_chunks_and_continued_by_others(seed: int) -> None:
    random = np.random.default_rng(seed)
    transcript, chunks, stored = Transcript(), list[Completion](), 0
    paths: list[list[int]] = []
    for _ in range(12):
        _step(transcript, random, paths)
        if random.random() < 0.5:
            chunks.append(decode_completion(encode_completion(transcript.completion(stored))))
            stored = len(transcript)
        if random.random() < 0.2 and chunks:  # its actor dies; the next one has what was stored
            transcript = Transcript.from_completion(join_completions(chunks))
            del paths[stored:]
    whole = transcript.completion()

    episode = replace(make_episode(), completion=whole)
    assert decode_episode(encode_episode(episode)).completion.branches == whole.branches
    assert [path_to(episode, token)[0] for token in range(len(whole.token_ids))] == paths
    for start in range(len(transcript)):
        halves = [_begin_of(whole, start), transcript.completion(start)]
        assert encode_completion(join_completions(halves)) == encode_completion(whole)


def _begin_of(whole: Completion, end: int) -> Completion:
    """The transcript as it was when it had so many tokens."""
    return Completion(
        whole.token_ids[:end],
        whole.behaviour_logprobs[:end],
        whole.loss_mask[:end],
        tuple(span for span in whole.versions if span.start < end),
        tuple(run for run in whole.fences if run.start < end),
        tuple(branch for branch in whole.branches if branch.start < end),
    )


def test_only_the_last_branch_before_tokens_counts() -> None:
    transcript = Transcript()
    transcript.sign(1, "actor")
    transcript.append_sampled([5, 6, 7], [-1.0] * 3, SPANS)

    transcript.branch(1)
    assert transcript.completion().branches == (), "it has no token yet"
    transcript.branch(2)
    transcript.append_sampled([8], [-1.0], SPANS)
    assert transcript.completion().branches == (Branch(3, 2),)
    assert transcript.completion(3).branches == (Branch(0, -1),)

    transcript.branch(None)
    transcript.branch(4)
    transcript.append_sampled([9], [-1.0], SPANS)
    assert transcript.completion().branches == (Branch(3, 2),), "it goes on where it was"


def test_branches_that_leave_the_stored_tokens_are_not_resumed() -> None:
    completion = replace(make_episode().completion, branches=(Branch(1, -1),))
    spec = TaskSpec(group_id=3, index=3, seed=5, purpose="train", temperature=0.7)
    lease = Lease(7, 10, spec, 2, chunks=(encode_completion(completion),))

    with pytest.raises(RecordError, match="parents >= 0"):
        _partial(lease, EpisodeLimits())
