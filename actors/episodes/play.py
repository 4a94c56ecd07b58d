"""Episodes outside of a run's episode loop: along a script, by an echo, or by a model.

`nyala env` shows them, `nyala eval` scores them, and `nyala new` chooses a temperature by them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from actors.chat import ChatMessage, as_messages, read_prompt, text_of
from actors.engine.engine import Engine
from actors.engine.tokenizer import Tokenizer
from actors.environments.base import Conversation, Environment, Score
from actors.environments.calls import call
from actors.rewards.functions import RewardSample
from broker.protocol.messages import Lease, TaskSpec
from configs.errors import EngineError

from .maker import EpisodeMaker
from .rollout import Rollout, State

MOST_TURNS = 50  # of a script or an echo, which no limit of tokens ends

Speaker = Callable[[Conversation, Sequence[ChatMessage]], str]
"""Returns the next turn for the turns and observations so far."""


@dataclass(frozen=True, slots=True)
class PlayedEpisode:
    """An episode that has ended."""

    sample: RewardSample
    """What reward functions get; its turns are all that was said after the prompt."""
    score: Score
    """Score that the environment gave."""
    ended: str
    """Reason for its end: `stop`, `length`, `environment`, or `turns` after `MOST_TURNS`."""
    pieces: tuple[tuple[str, bool], ...] = ()
    """The completion in stretches of tokens, each with whether it is trained; empty without a
    model."""
    prompt: str = ""
    """The prompt of a model, in its chat template; empty without a model."""
    tokens: int = 0
    """Number of tokens of the completion; 0 without a model."""


def follow_script(conversation: Conversation, said: Sequence[ChatMessage]) -> str:
    """Return the next turn of the demonstration, or the answer if there is no demonstration.

    After the last turn that one is repeated.
    """
    turns = [turn.text for turn in conversation.demonstration if turn.trained]
    turns = turns or [conversation.answer or ""]
    num_turns = sum(message.role == "assistant" for message in said)
    return turns[min(num_turns, len(turns) - 1)]


def echo(conversation: Conversation, said: Sequence[ChatMessage]) -> str:
    """Repeat the last message, or the prompt before there is one."""
    return said[-1].content if said else text_of(read_prompt(conversation.prompt))


async def play(
    environment: Environment, spec: TaskSpec, speak: Speaker, *, limit_s: float
) -> PlayedEpisode:
    """Play an episode without a model, of at most `MOST_TURNS` turns; errors come as they are.

    Args:
        environment: Environment of the run.
        spec: The task, which names the item.
        speak: Returns the next turn.
        limit_s: Time limit of one call of an `async` environment.
    """
    held_out = spec.purpose == "eval"
    conversation: Conversation = await call(
        environment.begin, spec.index, spec.seed, held_out=held_out, limit_s=limit_s
    )
    said: list[ChatMessage] = []
    ended = "turns"
    for _ in range(MOST_TURNS):
        said.append(ChatMessage("assistant", speak(conversation, said)))
        step = await call(conversation.step, said[-1].content, limit_s=limit_s)
        if step.done:
            ended = "environment" if step.observation else "stop"
            break
        said += as_messages(read_prompt(step.observation, "an observation"))
    score: Score = await call(conversation.score, limit_s=limit_s)
    sample = RewardSample.from_conversation(
        conversation,
        said,
        index=spec.index,
        purpose=spec.purpose,
        environment_reward=score.reward,
    )
    return PlayedEpisode(sample, score, ended)


async def play_model(
    engine: Engine,
    tokenizer: Tokenizer,
    maker: EpisodeMaker,
    environment: Environment,
    specs: Sequence[TaskSpec],
) -> list[PlayedEpisode]:
    """Let a started engine play these items side by side; results are in the order of `specs`.

    Raises:
        EngineError: The engine refuses a request, or has died.
        Exception: As `EpisodeMaker.begin_episode`, or the environment raised it.
    """
    rollouts = [
        await maker.begin_episode(Lease(number, 1, spec, 0), environment)
        for number, spec in enumerate(specs)
    ]
    await finish(engine, rollouts)
    return [_played(rollout, tokenizer, maker) for rollout in rollouts]


async def finish(engine: Engine, rollouts: Sequence[Rollout]) -> None:
    """Let a started engine sample these rollouts to their ends, side by side.

    Raises:
        EngineError: The engine refuses a request, or has died.
    """
    waiting: dict[str, Rollout] = {}

    def ask(rollout: Rollout) -> None:
        request = rollout.request()
        waiting[request.request_id] = rollout
        engine.submit([request])

    for rollout in rollouts:
        ask(rollout)
    while waiting:
        for delta in await engine.deltas():
            if delta.refusal is not None:
                raise EngineError(f"the engine has refused a prompt: {delta.refusal}")
            rollout = waiting[delta.request_id]
            rollout.append_delta(delta)
            if delta.finish_reason is None:
                continue
            del waiting[delta.request_id]
            rollout.settle(await rollout.judge())
            if rollout.state is State.SAMPLING:
                ask(rollout)
        await asyncio.sleep(0)


def _played(rollout: Rollout, tokenizer: Tokenizer, maker: EpisodeMaker) -> PlayedEpisode:
    assert rollout.score is not None
    pieces = tuple(_pieces(rollout, tokenizer))
    prompt = tokenizer.decode(rollout.prompt_ids)
    tokens = len(rollout.completion().token_ids)
    return PlayedEpisode(
        maker.sample(rollout), rollout.score, rollout.finish_reason, pieces, prompt, tokens
    )


def _pieces(rollout: Rollout, tokenizer: Tokenizer) -> Iterator[tuple[str, bool]]:
    completion = rollout.completion()
    tokens = zip(completion.token_ids.tolist(), completion.loss_mask.tolist(), strict=True)
    for bit, run in groupby(tokens, key=lambda token: token[1]):
        yield tokenizer.decode([token_id for token_id, _ in run]), bool(bit)
