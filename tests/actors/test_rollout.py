"""One episode: what ends up in the record, with and without a kill in its middle."""

from __future__ import annotations

from array import array
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.chat import read_prompt
from actors.engine.engine import Delta
from actors.engine.turns import StopStrings
from actors.environments.base import Conversation
from actors.environments.calculator import Calculator
from actors.environments.calls import drive
from actors.episodes.rollout import ReplayMismatch, Rollout, RolloutContext, State
from broker.protocol.messages import Lease, TaskSpec
from buffer.record.codec import decode_completion, encode_completion, join_completions
from buffer.record.episode import Branch, Completion, FenceRun, PolicyVersion, VersionSpan
from tests.actors.support.fake_engine import STOP, CharacterTokenizer, Policy, sample, scripted
from tests.actors.support.scripted_talk import Talk

OLD, NEW = PolicyVersion(1, 4), PolicyVersion(1, 5)
MULTIPLY = {"8*3=": "[8*3]", "24;": "31"}


def calculator_talk() -> Talk:
    return Talk("7+8*3=", "24;")


def make_rollout(
    talk: Conversation,
    *,
    fence: int = 10,
    incarnation: str = "first",
    limit: int = 64,
    partial: Completion | None = None,
) -> Rollout:
    lease = Lease(
        task_id=7,
        fence=fence,
        spec=TaskSpec(group_id=3, index=3, seed=5, purpose="train", temperature=0.7),
        length=0,
    )
    tokenizer = CharacterTokenizer()
    maker = RolloutContext(tokenizer, incarnation, limit)
    rollout = Rollout(lease, talk, tokenizer.encode_prompt(read_prompt(talk.prompt)), maker)
    if partial is not None and len(partial.token_ids):
        drive(rollout.resume(partial))
    return rollout


def play(
    rollout: Rollout,
    policy: Policy,
    *,
    version: PolicyVersion = OLD,
    stop_at: int = 10**9,
    step: int = 10**9,
) -> Rollout:
    """Run to the end, or until `stop_at` tokens are there."""
    while rollout.state is not State.FINISHED and rollout.length < stop_at:
        if rollout.state is State.JUDGING:
            rollout.settle(drive(rollout.judge()))
            continue
        room = min(step, stop_at - rollout.length)
        rollout.append_delta(sample(policy, rollout.request(), version, room))
    return rollout


def chunked(completion: Completion) -> Completion:
    """Through the codec, as the store would return it."""
    return join_completions([decode_completion(encode_completion(completion))])


def head(completion: Completion, length: int) -> Completion:
    return Completion(
        completion.token_ids[:length],
        completion.behaviour_logprobs[:length],
        completion.loss_mask[:length],
        tuple(s for s in completion.versions if s.start < length),
        tuple(f for f in completion.fences if f.start < length),
    )


def assert_same_tokens(a: Completion, b: Completion) -> None:
    np.testing.assert_array_equal(a.token_ids, b.token_ids)
    np.testing.assert_array_equal(a.behaviour_logprobs, b.behaviour_logprobs)
    np.testing.assert_array_equal(a.loss_mask, b.loss_mask)


def test_single_turn_ends_with_the_stop_token_and_trains_on_all_of_it():
    talk = Talk("abc>")

    rollout = play(make_rollout(talk), scripted({"abc>": "cba"}))

    completion = rollout.completion()
    assert CharacterTokenizer().decode(completion.token_ids.tolist()) == "cba\0"
    assert completion.loss_mask.tolist() == [1, 1, 1, 1]
    assert completion.versions == (VersionSpan(OLD, 0),)
    assert completion.fences == (FenceRun(10, "first", 0),)
    assert (rollout.finish_reason, talk.heard) == ("stop", ["cba"])


def test_observation_is_masked_and_has_no_log_prob():
    talk = calculator_talk()

    rollout = play(make_rollout(talk), scripted(MULTIPLY))

    completion = rollout.completion()
    assert CharacterTokenizer().decode(completion.token_ids.tolist()) == "[8*3]\00024;31\0"
    assert completion.loss_mask.tolist() == [1] * 6 + [0] * 3 + [1] * 3
    assert completion.behaviour_logprobs[6:9].tolist() == [0, 0, 0]
    assert np.all(completion.behaviour_logprobs[:6] != 0)
    assert talk.heard == ["[8*3]", "31"]


def test_request_of_the_second_turn_holds_all_that_came_before():
    rollout = make_rollout(calculator_talk(), limit=20)
    rollout.append_delta(sample(scripted(MULTIPLY), rollout.request(), OLD))
    rollout.settle(drive(rollout.judge()))

    request = rollout.request()

    assert CharacterTokenizer().decode(request.token_ids) == "7+8*3=[8*3]\00024;"
    assert (request.max_tokens, request.temperature) == (20 - 9, 0.7)
    assert request.stop_token_ids == (STOP,)


def test_a_request_names_its_random_numbers_and_what_there_is_of_its_turn():
    begun = play(make_rollout(calculator_talk()), scripted(MULTIPLY), stop_at=11)
    assert begun.state is State.SAMPLING
    fresh = make_rollout(calculator_talk()).request()

    resumed = make_rollout(calculator_talk(), fence=11, partial=chunked(begun.completion()))
    request = resumed.request()

    assert (fresh.turn, fresh.stream) == ((), (5, 7))
    assert CharacterTokenizer().decode(request.turn) == "31"
    assert request.token_ids[-2:] == request.turn
    assert request.stream == fresh.stream


def test_an_environment_without_branches_does_not_continue_them():
    begun = play(make_rollout(calculator_talk()), scripted(MULTIPLY), stop_at=6)
    branched = replace(begun.completion(), branches=(Branch(3, 1),))

    with pytest.raises(ReplayMismatch, match="its tokens have branches"):
        make_rollout(calculator_talk(), partial=branched)


def test_version_switches_inside_a_delta_become_spans_of_the_completion():
    rollout = make_rollout(Talk("abc>"))
    request = rollout.request()
    policy = scripted({"abc>": "cba"})
    whole = sample(policy, request, OLD)

    first = sample(policy, request, OLD, 1)
    rollout.append_delta(first)
    rollout.append_delta(
        type(whole)(
            request.request_id,
            whole.token_ids[1:],
            whole.logprobs[1:],
            (VersionSpan(OLD, 0), VersionSpan(NEW, 2)),
            "stop",
        )
    )

    assert rollout.completion().versions == (VersionSpan(OLD, 0), VersionSpan(NEW, 3))
    assert rollout.completion(start=2).versions == (VersionSpan(OLD, 0), VersionSpan(NEW, 1))


@pytest.mark.parametrize("step", [1, 3, 10**9])
def test_a_kill_at_any_token_costs_no_token(step):
    policy = scripted(MULTIPLY)
    whole = play(make_rollout(calculator_talk()), policy).completion()

    for cut in range(len(whole.token_ids) + 1):
        partial = chunked(head(whole, cut)) if cut else None
        resumed = make_rollout(calculator_talk(), fence=11, incarnation="second", partial=partial)
        play(resumed, policy, version=NEW, step=step)

        record = resumed.completion()
        assert_same_tokens(record, whole)
        assert (resumed.finish_reason, resumed.num_turns, resumed.resumed_at) == ("stop", 2, cut)
        if cut == 0:
            assert record.fences == (FenceRun(11, "second", 0),)
        elif cut == len(whole.token_ids):
            assert record.fences == (FenceRun(10, "first", 0),)
        else:
            assert record.fences == (FenceRun(10, "first", 0), FenceRun(11, "second", cut))


def test_a_kill_before_an_observation_changes_its_maker_but_not_its_version():
    policy = scripted(MULTIPLY)
    whole = play(make_rollout(calculator_talk()), policy).completion()

    resumed = make_rollout(calculator_talk(), fence=11, partial=chunked(head(whole, 6)))
    play(resumed, policy, version=NEW)

    # The observation keeps the span of its turn; the new policy begins at its own first token.
    assert resumed.completion().versions == (VersionSpan(OLD, 0), VersionSpan(NEW, 9))


@settings(deadline=None, max_examples=60)
@given(
    turns=st.lists(st.text("abc", max_size=4), min_size=1, max_size=4),
    observations=st.lists(st.text("xyz", max_size=3), max_size=3),
    limit=st.integers(1, 24),
    cuts=st.lists(st.integers(0, 24), max_size=4).map(sorted),
)
def test_any_series_of_kills_gives_the_record_of_an_uninterrupted_episode(
    turns, observations, limit, cuts
):
    prompt = "p:"

    def policy(context):
        # Turn number and position within the turn, found from the context alone.
        spoken = context[len(prompt) :]
        number = spoken.count(STOP)
        last = len(spoken) - (spoken[::-1].index(STOP) if number else len(spoken))
        observed = len(observations[number - 1]) if 0 < number <= len(observations) else 0
        position = len(spoken) - last - observed
        said = turns[number % len(turns)]
        return ord(said[position]) - ord("a") + 1 if position < len(said) else STOP

    whole = play(make_rollout(Talk(prompt, *observations), limit=limit), policy)
    rollout = make_rollout(Talk(prompt, *observations), limit=limit, fence=1)
    for fence, cut in enumerate(cuts, start=2):
        play(rollout, policy, stop_at=cut, step=2)
        partial = chunked(rollout.completion()) if rollout.length else None
        rollout = make_rollout(
            Talk(prompt, *observations), limit=limit, fence=fence, partial=partial
        )
    play(rollout, policy)

    assert_same_tokens(rollout.completion(), whole.completion())
    assert rollout.finish_reason == whole.finish_reason
    assert rollout.score == whole.score
    assert rollout.length <= limit
    fences = [run.fence for run in rollout.completion().fences]
    assert fences == sorted(set(fences))


def test_token_limit_cuts_a_turn_and_the_environment_hears_what_there_is():
    talk = Talk("abc>")

    rollout = play(make_rollout(talk, limit=2), scripted({"abc>": "cba"}))

    assert (rollout.finish_reason, rollout.length, talk.heard) == ("length", 2, ["cb"])


def test_observation_without_room_for_an_answer_ends_the_episode():
    rollout = play(make_rollout(calculator_talk(), limit=9), scripted(MULTIPLY))

    assert (rollout.finish_reason, rollout.length) == ("length", 6)
    assert rollout.completion().loss_mask.all()


@pytest.mark.parametrize(
    ("talk", "words"),
    [
        (Talk("7+8*3=", "25;"), "answers a finished turn differently"),
        (Talk("7+8*3="), "before its tokens end"),
    ],
)
def test_an_environment_that_answers_otherwise_is_noticed(talk, words):
    whole = play(make_rollout(calculator_talk()), scripted(MULTIPLY)).completion()

    with pytest.raises(ReplayMismatch, match=words):
        make_rollout(talk, partial=whole)


def test_sampled_tokens_where_an_observation_belongs_are_noticed():
    whole = play(make_rollout(calculator_talk()), scripted(MULTIPLY)).completion()
    mask = whole.loss_mask.copy()
    mask[7] = 1
    forged = Completion(
        whole.token_ids, whole.behaviour_logprobs, mask, whole.versions, whole.fences
    )

    with pytest.raises(ReplayMismatch, match="of one kind"):
        make_rollout(calculator_talk(), partial=forged)


def test_the_real_calculator_is_played_and_resumed_between_its_turns():
    environment = Calculator()
    conversation = environment.begin(5, 0, held_out=False)
    call, observed, answer = (segment.text for segment in conversation.demonstration)
    policy = scripted({conversation.prompt: call, observed: answer})

    played = play(make_rollout(conversation), policy)
    resumed = make_rollout(
        environment.begin(5, 0, held_out=False), partial=head(played.completion(), len(call) + 1)
    )
    play(resumed, policy)

    assert played.score is not None
    assert played.score.parts == {"exact": 1.0, "used_tool": 1.0}
    assert resumed.score == played.score


class Counted(array):
    """Counts the elements that are read."""

    read = 0

    def __getitem__(self, place):
        found = super().__getitem__(place)
        Counted.read += len(found) if isinstance(place, slice) else 1
        return found


@pytest.mark.parametrize("stop", [(), ("never",)], ids=["end tokens", "strings"])
def test_continuing_reads_each_token_a_few_times_however_many_turns_there_are(monkeypatch, stop):
    turns, length = 400, 20
    tokenizer = CharacterTokenizer()
    observations = ["go:"] * (turns - 1)
    rollout = make_rollout(Talk("p:", *observations), limit=10**6)
    for _ in range(turns - 1):
        turn = (*tokenizer.encode_prompt("a" * (length - 1)), STOP)
        rollout.append_delta(Delta("", turn, (-1.0,) * length, (VersionSpan(OLD, 0),), "stop"))
        rollout.settle(drive(rollout.judge()))
    partial = rollout.completion()
    monkeypatch.setattr("actors.episodes.rollout.array", Counted)
    monkeypatch.setattr("actors.episodes.rollout.STRETCH", 32)
    Counted.read = 0

    maker = RolloutContext(
        tokenizer, "second", 10**6, stops=StopStrings(stop, tokenizer.decode) if stop else None
    )
    again = Rollout(rollout.lease, Talk("p:", *observations), tokenizer.encode_prompt("p:"), maker)
    drive(again.resume(partial))

    assert (again.length, again.num_turns) == (len(partial.token_ids), turns - 1)
    assert Counted.read < 8 * again.length
