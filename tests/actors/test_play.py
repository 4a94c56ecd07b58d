"""Episodes played for a person to look at."""

from __future__ import annotations

import asyncio

import pytest

from actors.environments.base import Score, Segment, Step
from actors.environments.calculator import Calculator
from actors.episodes.maker import EpisodeMaker
from actors.episodes.play import MOST_TURNS, Speaker, echo, follow_script, play, play_model
from broker.protocol.messages import TaskSpec
from configs.settings import RunSettings
from tests.actors.support.fake_engine import CharacterTokenizer, FakeEngine, scripted

SPEC = TaskSpec(0, 0, 0, "train", 1.0)


class Stubborn:
    """Never ends."""

    prompt, answer = "why?", None
    demonstration = (Segment("because", trained=True),)

    def begin(self, index: int, seed: int, *, held_out: bool) -> Stubborn:
        return self

    def describe(self) -> str:
        return "stubborn"

    def step(self, text: str) -> Step:
        return Step("why?", done=False)

    def score(self) -> Score:
        return Score(0.25)


@pytest.mark.parametrize(("speak", "reward"), [(follow_script, 1.0), (echo, 0.0)])
def test_a_script_plays_the_demonstration_and_an_echo_what_it_heard(
    speak: Speaker, reward: float
) -> None:
    played = asyncio.run(play(Calculator(), SPEC, speak, limit_s=5.0))
    first, *rest = played.sample.turns

    assert played.score.reward == played.sample.environment_reward == reward
    assert played.ended == "stop"
    if reward:
        assert [turn.role for turn in rest] == ["user", "assistant"]
        assert rest[1].content == played.sample.answer
    else:
        assert (first.content, rest) == (played.sample.prompt, [])


def test_an_episode_that_never_ends_is_left_after_so_many_turns() -> None:
    played = asyncio.run(play(Stubborn(), SPEC, echo, limit_s=5.0))

    assert (played.ended, played.score.reward) == ("turns", 0.25)
    assert len(played.sample.turns) == 2 * MOST_TURNS


def test_the_models_tokens_are_shown_with_those_that_are_masked() -> None:
    environment = Calculator()
    conversation = environment.begin(0, 0, held_out=False)
    call, result, answer = (turn.text for turn in conversation.demonstration)
    engine = FakeEngine(scripted({result: answer, conversation.prompt: call}))
    tokenizer = CharacterTokenizer()
    run = RunSettings(model="init", environment="calculator", max_completion_tokens=40)

    async def story() -> None:
        await engine.start()
        maker = EpisodeMaker(tokenizer, run, "test")
        async with asyncio.timeout(10):
            (played,) = await play_model(engine, tokenizer, maker, environment, [SPEC])

        assert played.pieces == ((f"{call}\0", True), (result, False), (f"{answer}\0", True))
        assert (played.score.reward, played.ended) == (1.0, "stop")
        assert [turn.content for turn in played.sample.turns] == [call, result, answer]

    asyncio.run(story())
