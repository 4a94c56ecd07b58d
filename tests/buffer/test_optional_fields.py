"""Branches and the other optional fields of a record: kept, joined, left out, refused by name."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer.record.codec import (
    decode_completion,
    decode_episode,
    encode_completion,
    encode_episode,
    join_completions,
)
from buffer.record.episode import (
    KEYS_PER_TOKEN,
    Attachment,
    Branch,
    Completion,
    Episode,
    Message,
    RecordedCall,
    Stretch,
    TurnReward,
    attended_keys,
    longest_path,
    stretches,
    trajectories,
)
from buffer.record.rules import MAX_EXPERT_BYTES, EpisodeLimits
from buffer.record.summaries import summaries_of_chunks, summaries_of_records
from configs.errors import RecordError
from tests.buffer.support.episodes import completions, example_episode

MOST = 2**20
NO_ROOM = b"\x00" * 7
IMAGE = "0f" * 32


def _branched(*branches: Branch, mask: str = "1111") -> Episode:
    """An episode of as many tokens as its mask has bits."""
    episode = example_episode(tokens=len(mask))
    bits = np.array([int(bit) for bit in mask], np.uint8)
    logprobs = np.where(bits == 1, np.float32(-0.5), np.float32(0))
    completion = replace(
        episode.completion, loss_mask=bits, behaviour_logprobs=logprobs, branches=branches
    )
    return replace(episode, completion=completion)


FULL = replace(
    _branched(Branch(2, 1), Branch(4, None), mask="111101"),
    prompt_experts=np.arange(6, dtype=np.uint8).reshape(3, 2),
    prompt_attachments=(Attachment(0, "image", IMAGE),),
    turn_rewards=(TurnReward(0, 2, 0.5), TurnReward(2, 6, -1.0)),
    messages=(
        Message(0, "user", "What?", "", (), ""),
        Message(0, "assistant", "", "hm", (RecordedCall("call-1", "look", '{"x": 1}'),), ""),
        Message(4, "tool", "That.", "", (), "call-1"),
    ),
)
FULL = replace(
    FULL,
    completion=replace(
        FULL.completion,
        experts=np.arange(12, dtype=np.uint8).reshape(6, 2),
        support_sizes=np.array([2, 0, 1, 0, 0, 3], np.int32),
        support_ids=np.array([5, 6, 7, 8, 9, 10], np.int32),
        teacher_logprobs=np.array([-1, -2, -3, -4, 0, -5], np.float32),
        attachments=(Attachment(1, "file", IMAGE), Attachment(4, "image", IMAGE)),
    ),
)


def _equal(one: Completion, other: Completion) -> bool:
    return encode_completion(one) == encode_completion(other)


def test_every_optional_field_comes_back() -> None:
    decoded = decode_episode(encode_episode(FULL))

    for field in ("branches", "attachments"):
        assert getattr(decoded.completion, field) == getattr(FULL.completion, field)
    for field in ("prompt_attachments", "turn_rewards", "messages"):
        assert getattr(decoded, field) == getattr(FULL, field)
    for field in ("experts", "support_sizes", "support_ids", "teacher_logprobs"):
        assert np.array_equal(getattr(decoded.completion, field), getattr(FULL.completion, field))
    assert decoded.prompt_experts is not None and FULL.prompt_experts is not None
    assert np.array_equal(decoded.prompt_experts, FULL.prompt_experts)
    assert encode_episode(decoded) == encode_episode(FULL)


def test_a_field_that_is_empty_takes_no_byte() -> None:
    fields = msgpack.unpackb(encode_episode(example_episode()))

    assert len(fields) == 14 and len(fields["completion"]) == 6
    assert encode_episode(example_episode())[0] == 0x8E, "one byte for a map of 14"


def _cut(completion: Completion, start: int, end: int) -> Completion:
    """The chunk from one token to another."""
    versions = [s for s in completion.versions if s.start < end]
    fences = [r for r in completion.fences if r.start < end]
    first = max(i for i, s in enumerate(versions) if s.start <= start)
    begun = max(i for i, r in enumerate(fences) if r.start <= start)
    sizes, ids = completion.support_sizes, completion.support_ids
    if sizes is not None and ids is not None:
        ids = ids[int(sizes[:start].sum()) : int(sizes[:end].sum())]
    return replace(
        completion,
        token_ids=completion.token_ids[start:end],
        behaviour_logprobs=completion.behaviour_logprobs[start:end],
        loss_mask=completion.loss_mask[start:end],
        versions=tuple(replace(s, start=max(0, s.start - start)) for s in versions[first:]),
        fences=tuple(replace(r, start=max(0, r.start - start)) for r in fences[begun:]),
        branches=tuple(b.moved(-start) for b in completion.branches if start <= b.start < end),
        experts=None if completion.experts is None else completion.experts[start:end],
        support_sizes=None if sizes is None else sizes[start:end],
        support_ids=ids,
        teacher_logprobs=None
        if completion.teacher_logprobs is None
        else completion.teacher_logprobs[start:end],
        attachments=tuple(
            a._replace(start=a.start - start)
            for a in completion.attachments
            if start <= a.start < end
        ),
    )


def _merged(completion: Completion) -> Completion:
    """Put neighbours of one version, and of one fence and actor, together, as joining does."""
    return join_completions([completion])


@given(completions(min_tokens=1), st.data())
def test_chunks_join_at_every_cut(completion: Completion, data: st.DataObject) -> None:
    length = len(completion.token_ids)
    cuts = sorted({0, length, *data.draw(st.sets(st.integers(0, length), max_size=3))})
    pairs = itertools.pairwise(cuts)
    chunks = [encode_completion(_cut(completion, start, end)) for start, end in pairs]

    joined = decode_completion(b"".join(chunks))
    one_by_one = join_completions([decode_completion(chunk) for chunk in chunks])

    assert _equal(_merged(joined), one_by_one)
    assert _equal(_merged(joined), _merged(completion))
    for cut in range(1, length):
        halves = [_cut(completion, 0, cut), _cut(completion, cut, length)]
        assert _equal(join_completions(halves), _merged(completion))


def test_a_parent_before_its_chunk_is_negative() -> None:
    first = _branched().completion
    second = _branched(Branch(1, -3), Branch(2, 1)).completion

    joined = decode_completion(encode_completion(first) + encode_completion(second))

    assert joined.branches == (Branch(5, 1), Branch(6, 5))


def _in_completion(**changes: object) -> bytes:
    fields: dict[str, Any] = msgpack.unpackb(encode_episode(FULL))
    fields["completion"] |= changes
    return bytes(msgpack.packb(fields))


def _in_values(**changes: object) -> bytes:
    fields: dict[str, Any] = msgpack.unpackb(encode_episode(FULL))
    fields["completion"]["extras"] |= changes
    return bytes(msgpack.packb(fields))


def _in_extras(**changes: object) -> bytes:
    fields: dict[str, Any] = msgpack.unpackb(encode_episode(FULL))
    fields["extras"] |= changes
    return bytes(msgpack.packb(fields))


def _floats(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()


def _ints(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


MESSAGE = [0, "user", "", "", [], ""]


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (_in_completion(branches=[[2, 2]]), "branches.parent must be below its start 2, got 2"),
        (_in_completion(branches=[[2, 5]]), "branches.parent must be below its start 2, got 5"),
        (_in_completion(branches=[[2, -1]]), r"parents >= 0, got \[\(2, -1\)\]"),
        (_in_completion(branches=[[0, -1]]), "must start above 0"),
        (_in_completion(branches=[[6, 1]]), "branches.start must ascend and stay below 6, got"),
        (_in_completion(branches=[[3, 1], [3, 0]]), "branches.start must ascend"),
        (_in_completion(branches=[[3, 1], [2, 0]]), "branches.start must ascend"),
        (_in_completion(branches=[[3, None]]), "loss_mask must be 0 on the first token of a root"),
        (_in_completion(branches=[[3, 1, 1]]), "branches must be branches .start, parent., got"),
        (_in_completion(branches=[[3, "x"]]), r"branches must be .*got Expected .int \| null"),
        (_in_completion(branches=[[True, 0]]), "branches must be .*Expected .int., got .bool."),
        (_in_completion(branches={}), "branches must be branches .start, parent., got"),
        (_in_values(experts=NO_ROOM), "experts must have 1 to 4096 bytes for each of 6 tokens"),
        (_in_values(experts=b""), "experts must have 1 to 4096 bytes"),
        (_in_values(experts=b"\x00" * 6 * (MAX_EXPERT_BYTES + 1)), "got 24582 bytes"),
        (_in_values(experts=[1] * 6), "experts must be bytes"),
        (_in_values(support_sizes=None), "support_ids must come with support_sizes"),
        (_in_values(support_ids=None), "support_ids must come with support_sizes"),
        (_in_values(support_ids=NO_ROOM), "support_ids must be bytes in multiples of 4"),
        (_in_values(support_ids=_ints(1)), "support_sizes must be >= 0 and add up to the 1"),
        (_in_values(support_ids=_ints(1, 2, 3, 4, 5, -6)), "support_ids must be >= 0, got -6"),
        (_in_values(support_sizes=NO_ROOM), "support_sizes must have 4 bytes for each of 6"),
        (_in_values(support_sizes=_ints(-1, 1, 6, 0, 0, 0)), "support_sizes must be >= 0"),
        (_in_values(teacher_logprobs=NO_ROOM), "teacher_logprobs must have 4 bytes for each"),
        (_in_values(teacher_logprobs=_floats(*[-1] * 6)), "teacher_logprobs must be finite"),
        (
            _in_values(teacher_logprobs=_floats(-1, np.nan, -1, -1, 0, -1)),
            "teacher_logprobs must be finite",
        ),
        (_in_values(attachments=[[6, "file", IMAGE]]), "attachments.start must not descend"),
        (_in_values(attachments=[[0, "tape", IMAGE]]), "attachments must be at most 1024"),
        (_in_values(attachments=[[0, "file", "0f"]]), "attachments must be .*matching regex"),
        (_in_extras(prompt_experts=NO_ROOM), "prompt_experts must have 1 to 4096 bytes"),
        (_in_extras(prompt_attachments=[[3, "file", IMAGE]]), "prompt_attachments.start must"),
        (_in_extras(turn_rewards=[[0, 7, 1.0]]), "turn_rewards must be finite, of tokens up to 6"),
        (_in_extras(turn_rewards=[[2, 2, 1.0]]), "turn_rewards must be finite"),
        (_in_extras(turn_rewards=[[0, 2, float("nan")]]), "turn_rewards must be finite"),
        (_in_extras(turn_rewards=[[0, 2, "1"]]), "turn_rewards must be at most 4096 rewards"),
        (_in_extras(messages=[[4, *MESSAGE[1:]], MESSAGE]), "messages.start must not descend"),
        (_in_extras(messages=[[7, *MESSAGE[1:]]]), "messages.start must not descend and be at"),
        (_in_extras(messages=[[0, "king", *MESSAGE[2:]]]), "messages must be at most 4096"),
        (_in_extras(messages=[[*MESSAGE[:4], [["a", "b"]], ""]]), "messages must be"),
        (_in_extras(more=1), r"got also \['more'\]"),
    ],
)
def test_a_malformed_field_is_refused_by_its_name(record: bytes, text: str) -> None:
    with pytest.raises(RecordError, match=text) as decoding:
        decode_episode(record)
    with pytest.raises(RecordError) as looking:
        summaries_of_records([encode_episode(FULL), record], max_bytes=MOST)

    assert str(looking.value) == str(decoding.value)


def test_a_value_of_another_type_is_refused_before_it_is_written() -> None:
    class Place(int):
        pass

    wrong: Any = np.int64(1)
    for branch in (Branch(Place(2), 1), Branch(2, wrong)):
        with pytest.raises(RecordError, match=r"a record must be|branches must be"):
            encode_episode(_branched(branch))
    with pytest.raises(RecordError, match="experts must be a flat uint8 array, got int64"):
        encode_completion(replace(FULL.completion, experts=np.zeros((6, 2), np.int64)))


@pytest.mark.parametrize("field", ["experts", "support_sizes", "teacher_logprobs"])
def test_chunks_of_which_only_some_have_values_cannot_be_joined(field: str) -> None:
    with_values = replace(FULL.completion, branches=())
    left_out: dict[str, Any] = {field: None}
    if field == "support_sizes":
        left_out["support_ids"] = None
    without = replace(with_values, **left_out)
    together = encode_completion(with_values) + encode_completion(without)

    for join in (
        lambda: join_completions([with_values, without]),
        lambda: decode_completion(together),
        lambda: summaries_of_chunks([together], max_bytes=MOST),
    ):
        with pytest.raises(RecordError, match=f"{field} must be in all chunks of a completion"):
            join()


def test_experts_of_other_widths_cannot_be_joined() -> None:
    wide = replace(FULL.completion, branches=())
    narrow = replace(wide, experts=np.zeros((6, 1), np.uint8))

    with pytest.raises(RecordError, match=r"experts must be in all chunks .* got \[2, 1\]"):
        join_completions([wide, narrow])


# --------------------------------------------------------------------------------------------------
# The tree of a completion, and limits of its paths.


def _paths(branches: tuple[Branch, ...], length: int) -> list[tuple[list[int], bool]]:
    """Return the path of each token, and whether it begins with a root; token by token."""
    parents = dict(branches)
    paths: list[tuple[list[int], bool]] = []
    for token in range(length):
        parent = parents.get(token, token)
        path, is_rooted = paths[parent - 1] if parent else ([], parent is None)
        paths.append(([*path, token], is_rooted))
    return paths


@st.composite
def trees(draw: st.DrawFn) -> tuple[tuple[Branch, ...], int]:
    length = draw(st.integers(1, 14))
    starts = draw(st.sets(st.integers(1, length), max_size=6)) - {length}
    return tuple(
        Branch(start, draw(st.none() | st.integers(0, start - 1))) for start in sorted(starts)
    ), length


@given(trees())
def test_stretches_make_the_path_of_every_token(tree: tuple[tuple[Branch, ...], int]) -> None:
    branches, length = tree
    expected = _paths(branches, length)

    ending: dict[int | None, list[int]] = {0: [], None: []}
    covered: list[int] = []
    for start, end, parent in stretches(branches, length):
        for token in range(start, end):
            assert ending[parent] + [*range(start, token + 1)] == expected[token][0]
        ending[end] = ending[parent] + [*range(start, end)]
        covered += range(start, end)
    assert covered == [*range(length)]


@given(trees())
def test_paths_are_measured_as_their_tokens_count(tree: tuple[tuple[Branch, ...], int]) -> None:
    branches, length = tree
    paths = _paths(branches, length)
    ends = [paths[stretch.end - 1] for stretch in stretches(branches, length)]

    assert longest_path(branches, length) == max(
        len(path) for path, is_rooted in paths if not is_rooted
    )
    assert attended_keys(branches, length, 5) == sum(
        len(path) + (0 if is_rooted else 5) for path, is_rooted in ends
    )


def test_an_episode_repeats_at_most_so_many_keys_for_each_of_its_tokens() -> None:
    # The prompt's 3 tokens and 500 are seen by themselves, and by each of n that follow them:
    # 503 + 504 n <= 128 (503 + n).
    most = 503 * (KEYS_PER_TOKEN - 1) // (504 - KEYS_PER_TOKEN)

    def episode(num_leaves: int) -> Episode:
        mask = "1" * (500 + num_leaves)
        return _branched(*(Branch(500 + n, 500) for n in range(1, num_leaves)), mask=mask)

    assert decode_episode(encode_episode(episode(most)))
    text = r"at most 128 keys for each of \d+ tokens = \d+, got \d+; let the agent rewrite"
    with pytest.raises(RecordError, match=text):
        encode_episode(episode(most + 1))


@given(trees())
def test_each_token_is_in_one_trajectory_which_is_the_end_of_a_path(
    tree: tuple[tuple[Branch, ...], int],
) -> None:
    branches, length = tree
    paths = [path for path, _ in _paths(branches, length)]
    numbers = trajectories(branches, length)

    assert len(numbers) == length
    for number in set(numbers):
        tokens = [token for token in range(length) if numbers[token] == number]
        assert paths[tokens[-1]][-len(tokens) :] == tokens
        assert not any(path[-2:-1] == [tokens[-1]] for path in paths), "it ends where paths end"


def test_stretches_of_the_example_in_the_docstring() -> None:
    assert stretches((Branch(5, 3), Branch(7, None)), 9) == [
        Stretch(0, 3, 0),
        Stretch(3, 5, 3),
        Stretch(5, 7, 3),
        Stretch(7, 9, None),
    ]


LIMITS = EpisodeLimits(max_prompt_tokens=3, max_completion_tokens=4)


@pytest.mark.parametrize(
    "branches",
    [(), (Branch(4, 0),), (Branch(3, 2),), (Branch(1, None),)],
    ids=["linear", "two rows", "fork", "root"],
)
def test_all_branches_together_are_bounded(branches: tuple[Branch, ...]) -> None:
    LIMITS.check_episode(_branched(mask="1111"))
    episode = _branched(*branches, mask="10111")
    record = encode_episode(episode)
    text = "run.max_completion_tokens = 4, got 5 tokens"

    with pytest.raises(RecordError, match=text):
        LIMITS.check_episode(episode)
    with pytest.raises(RecordError, match=text):
        summaries_of_records([record], max_bytes=MOST, limits=LIMITS)
    with pytest.raises(RecordError, match=text):
        summaries_of_chunks([encode_completion(episode.completion)], max_bytes=MOST, limits=LIMITS)


def test_tokens_of_a_support_are_of_the_vocabulary() -> None:
    episode = replace(FULL, completion=replace(FULL.completion, branches=()))
    limits = EpisodeLimits(vocabulary=10)

    with pytest.raises(RecordError, match=r"vocabulary of run.model = 10, got 10"):
        summaries_of_records([encode_episode(episode)], max_bytes=MOST, limits=limits)
