"""Episodes as Hypothesis strategies, and one plain example."""

from __future__ import annotations

from typing import get_args

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from buffer.record.episode import Completion, Episode, FenceRun, PolicyVersion, VersionSpan
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
    )


def _starts(length: int) -> st.SearchStrategy[list[int]]:
    if not length:
        return st.just([])
    return st.sets(st.integers(0, length - 1), max_size=4).map(lambda starts: sorted(starts | {0}))


episodes = st.builds(
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
