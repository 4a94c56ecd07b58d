"""Simulated live agents, the real host that they run on, and what must hold of conversations.

A host is the product's, without its door: an agent is a coroutine that calls what the door calls.
The policy's next token is a pure function of task and context, as a table is for other episodes.
Invariants, beside those of `history.py`:

    OUTPUT  a reply that the store has written is of tokens that the store has
    TOLD    the ids of a prompt begin with all ids that the agent has been told before
    RECORD  an episode that is trained has every answer that its agent heard, and no other
    REWARD  an episode has the reward of the agent that ended, once
    CHARGED no fault of the run counts as a failure of the agent's
    LOST    a conversation is lost only where its host was hurt or the store was set back
    ENDS    when all is quiet, conversations end
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import tempfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from actors.engine.engine import GenerationRequest
from actors.engine.tokenizer import ModelTokenizer
from actors.environments.agent import AgentTask
from actors.environments.dataset.environment import DatasetConversation, DatasetSettings
from actors.environments.dataset.scorers import make_scorer
from actors.episodes.rollout import Transcript
from agents.conversation import AgentConversation, AgentEnd
from agents.host import AgentHost, first_of
from agents.requests import RequestError, RewardRequest, read_chat
from broker.client import BrokerClient
from broker.protocol.agent_calls import AgentAnswer, decode_reply, ids_of
from broker.transport.keys import KeyPair
from buffer.operations.keys import run_prefix
from buffer.record.codec import decode_completion
from buffer.record.episode import Episode
from configs.settings import Settings
from tests.actors.support.saved_tokenizer import CHATML, save_tokenizer
from tests.simulation.history import History
from tests.simulation.made_up import check_logprobs
from tests.simulation.memory_redis import MemoryRedis
from tests.simulation.store import View

HOST = "host"
"""Names of hosts, and of their connections, begin so."""
KEY = KeyPair(b"h" * 40, b"s" * 40)
ENDS_IN = 24  # one token in so many ends a turn
LETTERS = 26  # what else is sampled
VOCABULARY = 64  # no fewer than its tokenizer's tokens
SHARES = 1024  # rewards are multiples of 1/1024, which float32 keeps exactly
TRY_AGAIN_S = 1.0
STALE_S = 20.0  # after a rewind, actors may still answer the agents of before
GONE = 410  # the status of a conversation that is over


@cache
def tokenizer() -> ModelTokenizer:
    """The tokenizer of characters with a chat template."""
    with tempfile.TemporaryDirectory() as folder:
        return ModelTokenizer(save_tokenizer(folder, template=CHATML))


def sampled_after(task: int, context: Sequence[int], count: int) -> tuple[int, ...]:
    """Return what the policy says in a task after some tokens."""
    digest = zlib.crc32(np.array(context, "<i4").tobytes(), task)
    tokens: list[int] = []
    for _ in range(count):
        end = digest % ENDS_IN == 0
        tokens.append(tokenizer().stop_token_ids[0] if end else digest % LETTERS)
        digest = zlib.crc32(np.array(tokens[-1], "<i4").tobytes(), digest)
    return tuple(tokens)


def answer_to(request: GenerationRequest, count: int) -> tuple[int, ...]:
    """Return the next tokens of a request, whose name says whose task it is."""
    task = int(request.request_id.partition(".")[0])
    return sampled_after(task, request.token_ids, min(count, request.max_tokens))


class Tasks:
    """The environment: each row is its number."""

    def begin(self, index: int, seed: int, *, held_out: bool) -> AgentTask:
        settings = DatasetSettings(path="tasks.jsonl", prompt="task")
        scorer = make_scorer("exact", time_s=1.0, memory_mb=64)
        return AgentTask(DatasetConversation({"task": f"{index}"}, settings, scorer))

    def describe(self) -> str:
        return "agents"


@dataclass(eq=False)
class Life:
    """One agent, from its start to its end."""

    number: int
    task: int
    host: str
    began_at: float
    heard: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """Ids of each prompt and of the answer to it."""
    has_ended: bool = False
    """It went on to its own end."""
    is_over: bool = False

    @property
    def reward(self) -> float:
        """What it posts; no other agent does."""
        return self.number / SHARES


class AgentLog:
    """What all agents of a simulation have heard."""

    def __init__(self, run: str, history: History, clock: Callable[[], float]) -> None:
        self._history, self._prefix, self._clock = history, run_prefix(run), clock
        self.lives: list[Life] = []
        self.rewound_at = -math.inf
        self.is_ending = False
        """The run ends, and conversations with it."""

    def begin(self, task: int, host: str) -> Life:
        """Note an agent's start."""
        self._history.note("agents")
        if all(life.task != task for life in self.lives):
            self._history.note("tasks with agents")
        life = Life(len(self.lives) + 1, task, host, self._clock())
        self.lives.append(life)
        return life

    def hear(self, life: Life, answer: AgentAnswer) -> None:
        """Note an answer (TOLD)."""
        prompt, said = ids_of(answer.prompt_ids), ids_of(answer.completion_ids)
        if life.heard:
            before, was_said = life.heard[-1]
            known = before + was_said
            assert prompt[: len(known)] == known, f"TOLD: task {life.task} has forgotten"
        life.heard.append((prompt, said))
        self._history.note("answers heard")

    def lost(self, life: Life) -> None:
        """Note that a conversation was lost (LOST)."""
        self._history.note("conversations lost")
        is_fair = (
            life.host in self._history.unwell
            or self.rewound_at > life.began_at - STALE_S
            or self.is_ending
        )
        assert is_fair, f"LOST: the agent of task {life.task}, and {life.host} was never hurt"

    def check_failures(self, lines: Sequence[Any]) -> None:
        """Assert that no fault of the run is a failure of the agent's (CHARGED)."""
        for task, kind, reason in zip(lines[::4], lines[2::4], lines[3::4], strict=True):
            assert kind != "data", f"CHARGED: task {task}: {reason}"

    def check_replies(self, tasks: Sequence[int], database: MemoryRedis) -> None:
        """Assert that the store has the tokens of all replies to these tasks (OUTPUT)."""
        view: Any = View(database)
        for task in tasks:
            chunks = view.lrange(f"{self._prefix}:t:{task}:p", 0, -1)
            stored = sum(int(decode_completion(chunk).loss_mask.sum()) for chunk in chunks)
            replies = view.zrange(f"{self._prefix}:m:{task}:r", 0, -1)
            answers = [decode_reply(member.partition(b"\n")[2]) for member in replies]
            said = sum(x.num_completion_tokens for x in answers if isinstance(x, AgentAnswer))
            assert stored >= said, f"OUTPUT: task {task} has {stored} of {said} tokens said"

    def check_episode(self, episode: Episode) -> None:
        """Assert that a trained episode is what its agent heard (RECORD, REWARD, I3, I11)."""
        task, log = episode.task_id, Transcript.from_completion(episode.completion)
        life = self.lives[int(episode.reward * SHARES) - 1]
        assert episode.reward == life.reward and life.task == task, f"REWARD: {episode.reward}"
        assert life.has_ended, f"REWARD: the agent of task {task} has not ended"
        sampled = np.flatnonzero(episode.completion.loss_mask)
        assert len(sampled) == sum(len(said) for _, said in life.heard), f"RECORD: task {task}"
        assert not episode.completion.branches, f"RECORD: task {task} has forked"
        tokens = (*episode.prompt_ids.tolist(), *log.tokens())
        for prompt, said in life.heard:
            assert tokens[: len(prompt) + len(said)] == (*prompt, *said), f"RECORD: task {task}"
            assert tuple(said) == sampled_after(task, prompt, len(said)), f"I3: task {task}"
        check_logprobs(episode)

    @property
    def open_lives(self) -> list[Life]:
        """Agents whose conversations go on."""
        return [life for life in self.lives if not life.is_over]


class Host(AgentHost):
    """One incarnation of a host; make it inside its process."""

    def __init__(
        self,
        name: str,
        settings: Settings,
        endpoints: Sequence[str],
        rng: random.Random,
        log: AgentLog,
        *,
        work_s: float,
    ) -> None:
        self._name, self._rng, self._log, self._work_s = name, rng, log, work_s
        self._client = BrokerClient(
            endpoints[0],
            server_key=b"b" * 40,
            keys=KEY,
            run=settings.run.name,
            incarnation=name,
            other_endpoints=endpoints[1:],
        )
        super().__init__(self._client, settings.agents, drain_s=settings.actors.drain_s)

    async def live(self) -> None:
        """Take conversations until the run has ended."""
        try:
            await self.serve(asyncio.Event())
        finally:
            await self._client.close()

    async def _run_agent(self, conversation: AgentConversation) -> AgentEnd:
        life = self._log.begin(conversation.ticket.task_id, self._name)
        over = asyncio.ensure_future(conversation.over.wait())
        try:
            await first_of(self._talk(conversation, life), over)  # as a process is ended
        except RequestError as error:
            if error.status != GONE:
                raise
        finally:
            life.is_over = True
            over.cancel()
        if conversation.over.is_set():
            self._log.lost(life)
        else:
            life.has_ended = True
        return AgentEnd("ended")

    async def _talk(self, conversation: AgentConversation, life: Life) -> None:
        task = json.loads(conversation.ticket.payload)["task"]
        messages = [{"role": "user", "content": f"{task} of {life.number}"}]
        for _ in range(self._rng.randint(1, 4)):
            await asyncio.sleep(self._rng.uniform(0.0, self._work_s))
            answer = await self._ask(conversation, messages)
            self._log.hear(life, answer)
            messages += [
                {"role": "assistant", "content": answer.text},
                {"role": "user", "content": "go on"},
            ]
        await self._post(conversation, RewardRequest(0, life.reward, {}, is_done=False))

    async def _ask(
        self, conversation: AgentConversation, messages: list[dict[str, str]]
    ) -> AgentAnswer:
        """Call as a client does that tries again where the run does not answer."""
        body = json.dumps({"messages": messages, "return_token_ids": True}).encode()
        is_retry = False
        while True:
            try:
                call = await conversation.call(read_chat(body), is_retry=is_retry)
                break
            except RequestError as error:
                await self._pause(error)
                is_retry = True
        with call.waiting():
            reply = await call.reply
        assert isinstance(reply, AgentAnswer), f"RECORD: {reply}"
        call.is_heard = True
        return reply

    async def _post(self, conversation: AgentConversation, reward: RewardRequest) -> None:
        while True:
            try:
                await conversation.reward(reward)
                return
            except RequestError as error:
                await self._pause(error)

    @staticmethod
    async def _pause(error: RequestError) -> None:
        if error.status == GONE:
            raise error
        await asyncio.sleep(TRY_AGAIN_S)
