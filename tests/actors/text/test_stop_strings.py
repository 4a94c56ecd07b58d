"""Strings that end a turn: which token is the last, which text is passed on, what is trained."""

from __future__ import annotations

import pytest

from actors.engine.tokenizer import ModelTokenizer
from actors.engine.turns import StopStrings, TurnWatch
from actors.environments.calls import drive
from actors.episodes.maker import EpisodeMaker
from actors.episodes.rollout import Rollout, State
from broker.protocol.messages import Lease, TaskSpec
from buffer.record.codec import encode_completion
from buffer.record.episode import Completion, PolicyVersion
from configs.settings import RunSettings
from tests.actors.support.fake_engine import ALPHABET, STOP, CharacterTokenizer, sample
from tests.actors.support.saved_tokenizer import CHATML, save_tokenizer
from tests.actors.support.scripted_talk import Talk

SPEC = TaskSpec(group_id=0, index=0, seed=0, purpose="train", temperature=1.0)
SCRIPT = "call<go>24;it is 7<go>"
"""A turn, the observation that follows it, and another turn."""


def letters(token_ids):
    return "".join(chr(token) for token in token_ids)


def ids(text):
    return [ord(letter) for letter in text]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_a_turn_ends_at_the_same_token_in_whatever_parts_it_comes(size):
    stops = StopStrings(["</s", "##"], letters)
    turn = "a <b #</x " * 5 + "</s> and ##"
    end = turn.index("</s") + 3

    assert stops.find_end(ids(turn)) == end
    watch, seen = TurnWatch(stops, ids(turn)[:4]), 4
    while (more := watch.scan_tokens(ids(turn)[seen : seen + size])) is None:
        seen += size
    assert seen + more == end
    assert stops.cut(turn[:end]) == turn[: end - 3]


def test_a_string_of_several_bytes_is_found_in_a_tokenizer_of_bytes():
    stops = StopStrings(["né!"], lambda token_ids: bytes(token_ids).decode(errors="replace"))
    turn = list("il est né! ".encode())

    assert stops.find_end(turn) == len(turn) - 1
    assert stops.find_end(turn[:-2]) is None


class Game(Talk):
    """Answers the first turn, and is done after the second."""

    def begin(self, index: int, seed: int, *, held_out: bool) -> Game:
        return Game("p:", "24;")

    def describe(self) -> str:
        return "game"


def policy(context: tuple[int, ...]) -> int:
    said = len(context) - len("p:")
    return ALPHABET.index(SCRIPT[said]) if said < len(SCRIPT) else STOP


def begin(fence: int, partial: Completion | None = None) -> tuple[EpisodeMaker, Rollout]:
    run = RunSettings(model="-", max_completion_tokens=64, stop=("<go>",))
    maker = EpisodeMaker(CharacterTokenizer(), run, "me")
    lease = Lease(1, fence, SPEC, 0)
    if partial is not None and len(partial.token_ids):
        chunk = encode_completion(partial)
        lease = Lease(1, fence, SPEC, len(partial.token_ids), (chunk,))
    return maker, drive(maker.begin_episode(lease, Game("")))


def play(rollout: Rollout, stop_at: int = 10**9) -> None:
    while rollout.state is not State.FINISHED and rollout.length < stop_at:
        if rollout.state is State.JUDGING:
            rollout.settle(drive(rollout.judge()))
        else:
            left = stop_at - rollout.length
            rollout.append_delta(sample(policy, rollout.request(), PolicyVersion(1, 1), left))


def test_the_text_ends_before_the_string_and_its_tokens_are_trained():
    maker, rollout = begin(1)

    play(rollout)

    completion = rollout.completion()
    assert CharacterTokenizer().decode(completion.token_ids.tolist()) == SCRIPT
    assert [bool(bit) for bit in completion.loss_mask] == [True] * 8 + [False] * 3 + [True] * 11
    assert rollout.conversation.heard == ["call", "it is 7"]  # type: ignore[attr-defined]
    assert (rollout.finish_reason, rollout.num_turns) == ("stop", 2)
    assert maker.sample(rollout).completion == "call<go>24;it is 7"


def test_an_episode_that_is_killed_at_any_token_goes_on_alike():
    _, whole = begin(1)
    play(whole)

    for cut in range(len(SCRIPT) + 1):
        _, first = begin(1)
        play(first, stop_at=cut)
        _, again = begin(2, first.completion())
        assert not again.restarted
        play(again)

        assert again.completion().token_ids.tolist() == whole.completion().token_ids.tolist()
        assert again.completion().loss_mask.tolist() == whole.completion().loss_mask.tolist()
        assert again.finish_reason == "stop"


def test_an_observation_after_a_string_closes_the_turn_as_its_template_does(tmp_path):
    tokenizer = ModelTokenizer(save_tokenizer(tmp_path, template=CHATML))

    closed = tokenizer.decode(tokenizer.encode_observation("24;"))
    opened = tokenizer.decode(tokenizer.encode_observation("24;", is_open=True))

    assert opened == "<|im_end|>" + closed
