"""A live agent, its mailbox and an actor that is killed at any token, without I/O."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from actors.engine.engine import Delta, GenerationRequest
from actors.engine.tokenizer import ModelTokenizer
from actors.environments.agent import AgentTask
from actors.environments.dataset.environment import DatasetConversation, DatasetSettings
from actors.environments.dataset.rows import Row
from actors.environments.dataset.scorers import make_scorer
from actors.episodes.agent_rollout import AgentRollout
from actors.episodes.rollout import RolloutContext
from broker.protocol.agent_calls import (
    AgentAnswer,
    AgentCall,
    AgentReply,
    Route,
    decode_reply,
    encode_call,
    ids_of,
)
from broker.protocol.conversation_messages import StoredCall
from broker.protocol.messages import Lease, TaskSpec
from buffer.record.codec import decode_completion, encode_completion, join_completions
from buffer.record.episode import KEYS_PER_TOKEN, PolicyVersion, VersionSpan, attended_keys
from buffer.record.rules import check_log
from tests.actors.support.fake_engine import logprob_of

Message = dict[str, Any]


@dataclass
class StoredMailbox:
    """What the store has of a conversation."""

    bodies: list[bytes] = field(default_factory=list)
    replies: dict[int, AgentReply] = field(default_factory=dict)
    chunks: list[bytes] = field(default_factory=list)
    length: int = 0

    def call(self, fields: Mapping[str, Any], route: Route = "chat") -> int:
        """Store a call; return its number."""
        self.bodies.append(encode_call(AgentCall(route, json.dumps(fields).encode())))
        return len(self.bodies)

    def calls(self, start: int = 0) -> list[StoredCall]:
        """Calls as an actor gets them: each as what follows the common prefix with the last."""
        calls = []
        for number in range(start + 1, len(self.bodies) + 1):
            body, before = self.bodies[number - 1], [b"", *self.bodies][number - 1]
            keep = next(
                (i for i, (a, b) in enumerate(zip(body, before, strict=False)) if a != b),
                min(len(body), len(before)),
            )
            calls.append(StoredCall(number - 1, keep, body[keep:], number in self.replies))
        return calls


class Actors:
    """One actor after another with the same lease's task, around a policy of random tokens."""

    def __init__(
        self,
        tokenizer: ModelTokenizer,
        *,
        seed: int = 0,
        limit: int = 4000,
        end: float = 0.1,
        prompt: int = 200,
    ) -> None:
        self.tokenizer, self.rng, self.limit, self.end = tokenizer, Random(seed), limit, end
        self.prompt = prompt
        self.box = StoredMailbox()
        self.fence = 0
        self.running: dict[str, tuple[GenerationRequest, list[int]]] = {}
        self.sampled = self.kills = 0
        self.begin()

    def begin(self) -> None:
        """Let an actor go on from what is stored; the one before is gone."""
        self.fence += 1
        spec = TaskSpec(0, 0, 7, "train", 1.0)
        lease = Lease(1, self.fence, spec, self.box.length, tuple(self.box.chunks))
        partial = None
        if self.box.chunks:
            partial = join_completions([decode_completion(chunk) for chunk in self.box.chunks])
            assert len(partial.token_ids) == self.box.length
            check_log(partial.branches)
        context = RolloutContext(self.tokenizer, f"actor-{self.fence}", self.limit)
        row: Row = {"task": "question"}
        settings = DatasetSettings(path="tasks.jsonl", prompt="task")
        task = AgentTask(
            DatasetConversation(row, settings, make_scorer("exact", time_s=1.0, memory_mb=64))
        )
        self.rollout = AgentRollout(
            lease, task, context, max_prompt_tokens=self.prompt, has_reward=False, partial=partial
        )
        self.running.clear()
        self.listen()

    def kill(self) -> None:
        """End this actor; another one goes on."""
        self.kills += 1
        self.begin()

    def listen(self) -> None:
        """Take new calls."""
        calls = self.box.calls(self.rollout.num_read)
        for request in self.rollout.add_calls(calls, len(self.box.bodies)):
            assert request.max_tokens > 0
            self.running[request.request_id] = request, []

    def sample(self, request_id: str, tokens: Sequence[int] = ()) -> None:
        """Give one request a few tokens: random ones, or these."""
        request, so_far = self.running[request_id]
        context = request.token_ids + tuple(so_far)
        room = request.max_tokens - len(so_far)
        end = self.tokenizer.stop_token_ids[0]
        drawn = list(tokens) or [
            end if self.rng.random() < self.end else self.rng.randrange(50)
            for _ in range(self.rng.randint(1, 5))
        ]
        drawn = drawn[:room]
        stops = [place for place, token in enumerate(drawn) if token in request.stop_token_ids]
        drawn = drawn[: stops[0] + 1] if stops else drawn
        if request.stop_strings is not None:
            turn = (*request.turn, *so_far)
            ended = request.stop_strings.find_end((*turn, *drawn), len(turn))
            if ended is not None:
                drawn, stops = drawn[: ended - len(turn)], [ended]
        reason = "stop" if stops else "length" if len(drawn) == room else None
        logprobs = [logprob_of((*context, *drawn[:n])) for n in range(1, len(drawn) + 1)]
        self.sampled += len(drawn)
        version = VersionSpan(PolicyVersion(0, self.sampled // 50), 0)
        delta = Delta(request_id, tuple(drawn), tuple(logprobs), (version,), reason)
        so_far += drawn
        goes_on = self.rollout.append_delta(delta)
        if reason is not None or not goes_on:
            del self.running[request_id]

    def snapshot(self) -> None:
        """Store the tokens that the store lacks, as a heartbeat does."""
        if self.rollout.length > self.box.length:
            self.box.chunks.append(encode_completion(self.rollout.completion(self.box.length)))
            self.box.length = self.rollout.length

    def say(self, *, with_tokens: bool = True) -> None:
        """Store the replies that wait, with their tokens."""
        if self.rollout.replies and with_tokens:
            self.snapshot()
        for number, reply in list(self.rollout.replies.items()):
            assert number not in self.box.replies
            assert reply.turn_end <= (self.box.length if with_tokens else self.rollout.length)
            self.box.replies[number] = decode_reply(reply.stored)
            self.rollout.confirm(number)

    def turn(self, text: str, messages: Sequence[Message], **fields: Any) -> AgentReply:
        """Call, let the policy say this text, and return the reply."""
        number = self.box.call({"messages": list(messages), "return_token_ids": True, **fields})
        self.listen()
        for request_id in list(self.running):
            ids = self.tokenizer._tokenizer.encode(text, add_special_tokens=False)
            self.sample(request_id, [*ids, self.tokenizer.stop_token_ids[0]])
        self.say()
        return self.box.replies[number]


def check_record(actors: Actors) -> None:
    """Check that the log has what was sampled, after what it was sampled, each turn once."""
    rollout = actors.rollout
    completion = rollout.completion()
    assert len(completion.token_ids) <= actors.limit
    check_log(completion.branches)
    num_prompt, length = len(rollout.prompt_ids), len(completion.token_ids)
    keys = attended_keys(completion.branches, length, num_prompt)
    assert keys <= KEYS_PER_TOKEN * (num_prompt + length)
    logprobs, mask = completion.behaviour_logprobs.tolist(), completion.loss_mask.tolist()
    for place, is_sampled in enumerate(mask):
        if is_sampled:
            assert logprobs[place] == logprob_of(rollout._places.path_ids(place + 1)), place
    whole = sorted(
        rollout._places.path_ids(turn.end)
        for turn in rollout._turns.values()
        if turn.message is not None
    )
    heard = [reply for reply in actors.box.replies.values() if isinstance(reply, AgentAnswer)]
    assert whole == sorted(
        (*ids_of(reply.prompt_ids), *ids_of(reply.completion_ids)) for reply in heard
    )
    if len(whole) == len(rollout._turns):
        assert sum(mask) == sum(reply.num_completion_tokens for reply in heard)


class RandomAgent:
    """An agent that goes on, forks, begins sub-agents, and asks several things at once."""

    def __init__(self, box: StoredMailbox, rng: Random) -> None:
        self.box, self.rng = box, rng
        self.left = rng.randint(1, 7)
        self.chats: list[list[Message]] = [[{"role": "user", "content": "question"}]]
        self.asked: dict[int, list[Message]] = {}
        self.is_done = False

    def act(self) -> None:
        """Hear replies; call again once all are there."""
        for number in [number for number in self.asked if number in self.box.replies]:
            chat, reply = self.asked.pop(number), self.box.replies[number]
            if isinstance(reply, AgentAnswer):
                said = {"role": "assistant", "content": reply.text}
                role = self.rng.choice(["tool", "user"])
                more = {"role": role, "content": "x" * self.rng.randint(0, 9)}
                self.chats.append([*chat, said, more])
            elif reply.status == 400:
                self.left = 0
        if self.asked:
            return
        if not self.left:
            self.is_done = True
            return
        self.left -= 1
        for chat in self._next_chats():
            fields: dict[str, Any] = {"messages": chat, "return_token_ids": True}
            if self.rng.random() < 0.2:
                fields["max_tokens"] = self.rng.randint(1, 9)
            self.asked[self.box.call(fields)] = chat

    def _next_chats(self) -> Iterator[list[Message]]:
        last = self.chats[-1]
        for _ in range(self.rng.choice([1, 1, 1, 2, 3])):
            way = self.rng.random()
            if way < 0.5:
                yield last
            elif way < 0.65:  # an earlier one again
                yield self.rng.choice(self.chats)
            elif way < 0.8 and len(last) > 2:  # a rewritten history
                place = self.rng.randrange(len(last))
                yield [*last[:place], {**last[place], "content": "cut"}, *last[place + 1 :]]
            else:
                content = "q" * self.rng.randint(1, 5)
                yield [{"role": "user", "content": content}]


def live(tokenizer: ModelTokenizer, seed: int, *, with_tokens: bool = True, **more: Any) -> Actors:
    """Play a conversation to its end, with kills at any moment."""
    actors = Actors(tokenizer, seed=seed, **more)
    rng, agent = actors.rng, RandomAgent(actors.box, Random(seed))
    while not agent.is_done:
        agent.act()
        actors.listen()
        if actors.running:
            actors.sample(rng.choice(list(actors.running)))
        if rng.random() < 0.05:
            actors.kill()
        if rng.random() < 0.1:
            actors.snapshot()
        if rng.random() < 0.5:
            actors.say(with_tokens=with_tokens)
        if rng.random() < 0.05:
            actors.kill()
    return actors
