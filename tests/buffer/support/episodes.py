"""Episodes as Hypothesis strategies, and one plain example."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, get_args

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from buffer.record.episode import (
    Attachment,
    Branch,
    Completion,
    Episode,
    FenceRun,
    Message,
    PolicyVersion,
    RecordedCall,
    TurnReward,
    VersionSpan,
)
from buffer.record.wire import MAX_NUMBER, FinishReason, Purpose

numbers = st.integers(0, MAX_NUMBER)
finite = st.floats(allow_nan=False, allow_infinity=False)
names = st.text(
    st.characters(exclude_categories=["C", "Zl", "Zp", "Zs"], include_characters=" "), max_size=12
)
named_floats = st.dictionaries(names, finite, max_size=3)


@st.composite
def completions(draw: st.DrawFn, *, min_tokens: int = 0) -> Completion:
    """Valid completions of up to 12 tokens."""
    length = draw(st.integers(min_tokens, 12))
    mask = draw(arrays.arrays(np.uint8, length, elements=st.integers(0, 1)))
    logprobs = draw(arrays.arrays(np.float32, length, elements=st.floats(-(2.0**100), 0, width=32)))
    versions = [
        VersionSpan(PolicyVersion(draw(numbers), draw(numbers)), start)
        for start in draw(_starts(length))
    ]
    run_starts = draw(_starts(length))
    branches = draw(_branches(length))
    for start, parent in branches:
        mask[start] = 0 if parent is None else mask[start]
    sizes = arrays.arrays(np.int32, length, elements=st.integers(0, 3))
    support_sizes = draw(st.none() | sizes) if length else None
    fences = sorted(draw(st.lists(numbers, min_size=len(run_starts), max_size=len(run_starts))))
    return Completion(
        token_ids=draw(arrays.arrays(np.int32, length, elements=st.integers(0, 2**31 - 1))),
        behaviour_logprobs=np.where(mask == 1, logprobs, np.float32(0)),
        loss_mask=mask,
        versions=tuple(versions),
        fences=tuple(
            FenceRun(fence, draw(names), start)
            for fence, start in zip(fences, run_starts, strict=True)
        ),
        branches=branches,
        experts=draw(_experts(length)),
        support_sizes=support_sizes,
        support_ids=None
        if support_sizes is None
        else draw(arrays.arrays(np.int32, int(support_sizes.sum()), elements=tokens)),
        teacher_logprobs=draw(st.sampled_from([None, np.where(mask == 1, logprobs, np.float32(0))]))
        if length
        else None,
        attachments=draw(_attachments(length)),
    )


tokens = st.integers(0, 2**31 - 1)


def _branches(length: int) -> st.SearchStrategy[tuple[Branch, ...]]:
    """Branches of a record; most completions have none."""
    if length < 2:
        return st.just(())
    starts = st.sets(st.integers(1, length - 1), max_size=4).map(sorted)
    return st.just(()) | starts.flatmap(
        lambda starts: st.tuples(
            *(st.builds(Branch, st.just(s), st.none() | st.integers(0, s - 1)) for s in starts)
        )
    )


def _experts(length: int) -> st.SearchStrategy[np.ndarray | None]:
    if not length:
        return st.none()
    return st.none() | arrays.arrays(np.uint8, (length, 3), elements=st.integers(0, 255))


def _attachments(length: int) -> st.SearchStrategy[tuple[Attachment, ...]]:
    if not length:
        return st.just(())
    places = st.lists(st.integers(0, length - 1), max_size=2).map(sorted)
    kinds = st.sampled_from(["image", "file"])
    return places.flatmap(
        lambda places: st.tuples(
            *(st.builds(Attachment, st.just(p), kinds, DIGEST) for p in places)
        )
    )


DIGEST = st.sampled_from(["0" * 64, "9af" + "e" * 61])


def _starts(length: int) -> st.SearchStrategy[list[int]]:
    if not length:
        return st.just([])
    return st.sets(st.integers(0, length - 1), max_size=4).map(lambda starts: sorted(starts | {0}))


_calls = st.lists(st.builds(RecordedCall, names, names, names), max_size=2).map(tuple)
_roles: st.SearchStrategy[Literal["user", "assistant", "tool"]] = st.sampled_from(
    ["user", "assistant", "tool"]
)


@st.composite
def episodes_with_extras(draw: st.DrawFn) -> Episode:
    """Episodes with optional fields beside those of their completion."""
    episode = draw(plain_episodes)
    num_prompt, length = len(episode.prompt_ids), len(episode.completion.token_ids)
    starts = sorted(draw(st.lists(st.integers(0, length), max_size=3)))
    return replace(
        episode,
        prompt_experts=draw(_experts(num_prompt)),
        prompt_attachments=draw(_attachments(num_prompt)),
        turn_rewards=tuple(TurnReward(s, length, draw(finite)) for s in starts if s < length),
        messages=tuple(
            Message(s, draw(_roles), draw(names), draw(names), draw(_calls), draw(names))
            for s in starts
        ),
    )


plain_episodes = st.builds(
    Episode,
    task_id=numbers,
    group_id=numbers,
    purpose=st.sampled_from(get_args(Purpose)),
    prompt_ids=arrays.arrays(np.int32, st.integers(1, 8), elements=st.integers(0, 2**31 - 1)),
    completion=completions(min_tokens=1),
    reward=finite,
    reward_parts=named_floats,
    finish_reason=st.sampled_from(get_args(FinishReason)),
    environment_metrics=named_floats,
    incarnation=names,
    started_at=finite,
    finished_at=finite,
    metadata=st.dictionaries(names, names, max_size=3),
)
episodes = plain_episodes | episodes_with_extras()


def example_episode(*, tokens: int = 4) -> Episode:
    """One valid episode."""
    return Episode(
        task_id=17,
        group_id=4,
        purpose="train",
        prompt_ids=np.arange(3, dtype=np.int32),
        completion=Completion(
            token_ids=np.arange(tokens, dtype=np.int32),
            behaviour_logprobs=np.full(tokens, -0.5, np.float32),
            loss_mask=np.ones(tokens, np.uint8),
            versions=(VersionSpan(PolicyVersion(1, 2), 0),),
            fences=(FenceRun(5, "host-1", 0),),
        ),
        reward=0.25,
        reward_parts={"exact": 0.25},
        finish_reason="stop",
        environment_metrics={"turns": 2.0},
        incarnation="host-1",
        started_at=1.0,
        finished_at=2.5,
        metadata={"answer": "cba"},
    )
