"""A rollout of a scripted conversation, begun or continued."""

from __future__ import annotations

from actors.chat import read_prompt
from actors.environments.base import Conversation
from actors.environments.calls import drive
from actors.episodes.rollout import Rollout, RolloutContext
from broker.protocol.messages import Lease, TaskSpec
from buffer.record.episode import Completion
from tests.actors.support.fake_engine import CharacterTokenizer
from tests.actors.support.scripted_talk import Talk


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
