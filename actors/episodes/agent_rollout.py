"""One episode of a live agent: its calls become turns of one log of tokens.

    call --read--> OPEN --its tokens--> whole in the log --> reply waits --confirm--> said
             +---> refused: an error is its reply

The agent's process is elsewhere, and is never run again when an actor dies: its calls are in the
mailbox, and the log holds every token that it has heard. Several calls may be open at a time, and
each is a request of its own. A log alone shows whose its tokens are, by three rules:

- The first call is the prompt. Every other turn begins with a token of the environment, or is a
  branch that follows the prompt at once.
- Turns begin in the order of their calls. A turn beside the one that has written last waits until
  it has ended or has many tokens, and goes on as a branch at its own end.
- A call is refused by its body alone, or because there is no room, as all calls after it are.

So a lease that brings tokens cuts the log into turns, gives them to the calls in order, and goes
on in mid-turn. Invariant: a reply waits until all tokens of its turn are in the log, and names its
end there; the store takes it only with the log up to that end. No I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from actors.chat import ChatMessage
from actors.engine.engine import Delta, GenerationRequest
from actors.engine.tokenizer import Chat, ModelTokenizer
from actors.engine.turns import StopStrings
from actors.environments.agent import AgentTask
from actors.environments.base import Score
from actors.environments.calls import call as call_method
from broker.protocol.agent_calls import (
    MAX_ERROR,
    AgentError,
    AgentReply,
    decode_call,
    encode_reply,
)
from broker.protocol.conversation_messages import Reward, StoredCall
from broker.protocol.messages import Lease
from buffer.record.episode import KEYS_PER_TOKEN, Completion, Int32
from configs.errors import RecordError, RewardError, SettingsError

from .agent_chat import (
    BEGIN_OF_THINKING,
    CallError,
    TurnRequest,
    answer_of,
    read_request,
    said_in,
    token_fields,
)
from .agent_log import CallBodies, StoredTurn, stored_turns
from .agent_places import AgentTurn, RenderedChat, TurnPlaces
from .rollout import Judgement, ReplayMismatch, RolloutContext, State, Transcript

ALTERNATE_TOKENS = 256  # of a turn beside another, until both are stored: a kill costs fewer
STRETCHES = 4  # of the log that an open turn may still cut: its own, and those that it interrupts
NO_ROOM = (
    "This model's maximum context length is reached (context_length_exceeded): the conversation "
    "may have {most} tokens behind its first prompt, all branches together"
)
PROMPT_TOO_LONG = (
    "This model's maximum context length is {most} tokens for the first prompt "
    "(context_length_exceeded), got {length}"
)


class TurnReply(NamedTuple):
    """A reply to store."""

    turn_end: int
    """Tokens of the log up to the end of its turn; 0 = an error, which has no turn."""
    stored: bytes


class AgentRollout:
    """The episode of one lease whose turns a live agent asks for.

    Example:
        rollout = AgentRollout(lease, task, context, max_prompt_tokens=1024, has_reward=True)
        engine.submit(rollout.add_calls(calls, num_calls))
        rollout.append_delta(delta)
        for number, reply in rollout.replies.items(): ...
        rollout.confirm(number)
        rollout.end("ended", "", rewards)
    """

    restarted = False

    def __init__(
        self,
        lease: Lease,
        task: AgentTask,
        context: RolloutContext,
        *,
        max_prompt_tokens: int,
        has_reward: bool,
        partial: Completion | None = None,
    ) -> None:
        """Begin without a call.

        Args:
            lease: Lease of the task.
            task: The row that the agent is told.
            context: What all episodes of the actor share.
            max_prompt_tokens: Longest prompt of the first call.
            has_reward: Reward functions score the episode.
            partial: Tokens of earlier leases.

        Raises:
            ReplayMismatch: `partial` is not the log of a live agent.
        """
        assert isinstance(context.tokenizer, ModelTokenizer)
        self.lease = lease
        self.conversation = task
        self.state = State.SAMPLING
        self.finish_reason = ""
        self.score: Score | None = None
        self.num_turns = 0
        self.turns: list[ChatMessage] = []
        """All that was said, once the agent has ended."""
        self.replies: dict[int, TurnReply] = {}
        """Replies to store, by number of their call."""
        self.num_calls = 0
        self._tokenizer = context.tokenizer
        self._context = context
        self._max_prompt_tokens = max_prompt_tokens
        self._has_reward = has_reward
        self._transcript = Transcript()
        self._stored: list[StoredTurn] = []
        if partial is not None and len(partial.token_ids):
            self._transcript = Transcript.from_completion(partial)
            self._stored = stored_turns(partial)
        self.resumed_at = self.length
        self._calls = CallBodies()
        self._turns: dict[int, AgentTurn] = {}
        """By number of the call, in order."""
        self._open: dict[int, AgentTurn] = {}
        """Turns that are not answered, in order."""
        self._places = TurnPlaces(self._tokenizer, self._transcript)
        self._writer: AgentTurn | None = None
        self._longest: tuple[int, int, Chat] = 0, 0, Chat(())
        """Of the chats with answers: messages, number of its last call, and the chat."""
        self._posted: Score | None = None
        self._is_full = False
        self._ended_by = self._last_words = ""

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """Tokens of the first call; empty until it has come."""
        return tuple(self._places.prompt.tolist())

    @property
    def length(self) -> int:
        """Tokens of the log."""
        return len(self._transcript)

    @property
    def is_waiting(self) -> bool:
        """Whether nothing is left to do until the agent calls again."""
        return not self._open and not self.replies

    @property
    def open_requests(self) -> list[str]:
        """Ids of the requests whose turns are not over."""
        return [self._request_id(turn) for turn in self._open.values() if not turn.is_over]

    def text(self) -> str:
        """Text of the last turn."""
        return self.turns[-1].content if self.turns else ""

    def completion(self, start: int = 0) -> Completion:
        """Return the log from token `start` on."""
        return self._transcript.completion(start)

    def prompt_array(self) -> Int32:
        """Return the prompt's tokens. Shape [P]."""
        return self._places.prompt

    def add_calls(self, calls: Iterable[StoredCall], num_calls: int) -> list[GenerationRequest]:
        """Take further calls, and return requests for their turns.

        Args:
            calls: Calls after those that were taken.
            num_calls: Calls that the mailbox has; nothing begins until all of them are here.

        Raises:
            ReplayMismatch: The mailbox and the stored tokens are of different conversations.
        """
        self._calls.calls += calls
        new = range(self.num_calls + 1, len(self._calls.calls) + 1)
        if len(self._calls.calls) < num_calls or not new:
            return []
        self.num_calls = len(self._calls.calls)
        requests = [request for number in new if (request := self._open_call(number)) is not None]
        if self._stored:
            raise ReplayMismatch(f"{len(self._stored)} turns of its log answer no call")
        self._write()
        return requests

    @property
    def num_read(self) -> int:
        """Calls that were taken."""
        return len(self._calls.calls)

    @property
    def num_said(self) -> int:
        """Calls whose replies are known to be stored."""
        return self.num_calls - len(self._open) - len(self.replies)

    def append_delta(self, delta: Delta) -> bool:
        """Append new tokens of a turn.

        Returns:
            False if the turn has no room for more: its request is to be stopped.
        """
        turn = self._open.get(int(delta.request_id.rpartition(".")[2]))
        if turn is None:
            return False
        count = min(len(delta.token_ids), self._room())
        turn.tokens.append_sampled(delta.token_ids[:count], delta.logprobs[:count], delta.versions)
        self._note_end(turn)
        is_stopped = delta.finish_reason is None and (turn.is_over or self._room() < 1)
        if delta.finish_reason is not None or is_stopped:
            turn.is_over = True
        self._write()
        return not is_stopped

    def confirm(self, number: int) -> None:
        """Note that a reply is stored."""
        self.replies.pop(number, None)

    def end(self, why: str, text: str, rewards: Sequence[Reward]) -> None:
        """End the episode, as the agent or its host wished; open turns are given up.

        Args:
            why: `ended`, or what the agent was ended by.
            text: What its host says of that.
            rewards: Rewards that were posted.
        """
        self._ended_by, self._last_words = why, text
        self._open.clear()
        self.replies.clear()
        whole = [reward for reward in rewards if not reward.number] or list(rewards)
        if whole:
            parts = {name: value for reward in whole for name, value in reward.parts.items()}
            self._posted = Score(sum(reward.reward for reward in whole), parts)
        self.turns = self._said()
        self.state = State.JUDGING

    async def judge(self) -> Judgement:
        """Score what was said: by the agent's own reward, or by the answer of its row.

        Raises:
            RewardError: Nothing gives a reward.
        """
        reason = "length" if self._is_full else "stop"
        if self._ended_by != "ended":
            reason = "environment"
        if self._posted is not None:
            return Judgement((), (), reason, self._posted)
        if self._has_reward:
            return Judgement((), (), reason, Score(0.0))
        if self.conversation.answer is None:
            raise RewardError(
                f"the agent of a task must post a reward, got none and the end {self._ended_by!r} "
                f"{self._last_words}; post one, or set run.reward, or environment_settings.answer"
            )
        limit_s = self._context.limit_s
        await call_method(self.conversation.step, self.text(), limit_s=limit_s)
        score: Score = await call_method(self.conversation.score, limit_s=limit_s)
        return Judgement((), (), reason, score)

    def settle(self, judgement: Judgement) -> None:
        """Take the score that `judge` returned."""
        assert judgement.finish_reason is not None
        self.state = State.FINISHED
        self.finish_reason, self.score = judgement.finish_reason, judgement.score

    # ----------------------------------------------------------------------------------------------
    # Calls.

    def _open_call(self, number: int) -> GenerationRequest | None:
        """Begin or continue the turn of a call; None if nothing is to be sampled."""
        is_answered = self._calls.calls[number - 1].is_answered
        try:
            request, rendered = self._read(self._calls.body(number))
            if not len(self._places.prompt):
                self._places.begin(self._first_prompt(request, rendered))
            if self._stored:
                turn = self._resumed(number, request, rendered, self._stored.pop(0))
            elif is_answered or self._is_full:
                raise self._full()
            else:
                turn = self._new_turn(number, request, rendered)
        except (CallError, RecordError, SettingsError, RecursionError) as error:
            if not is_answered:
                field_ = error.field if isinstance(error, CallError) else ""
                refusal = AgentError(400, str(error)[:MAX_ERROR], field_)
                self.replies[number] = TurnReply(0, encode_reply(refusal))
            return None
        self._turns[number] = self._open[number] = turn
        self._note_end(turn)
        if is_answered:
            turn.is_over = True
            self._answer(turn, is_said=True)
        return None if turn.is_over else self._request(turn)

    def _read(self, body: bytes) -> tuple[TurnRequest, RenderedChat | None]:
        """Read a call, and refuse what can be refused by its body alone."""
        request = read_request(decode_call(body))
        if request.chat is not None:
            return request, self._places.render(request.chat)
        if max(request.token_ids) >= (num_tokens := self._tokenizer.num_tokens):
            got = f"{num_tokens}, got {max(request.token_ids)}"
            raise CallError(f"token_ids must be below the tokens of run.model, {got}")
        return request, None

    def _first_prompt(self, request: TurnRequest, rendered: RenderedChat | None) -> tuple[int, ...]:
        prompt_ids = request.token_ids
        if rendered is not None:
            prompt_ids = self._tokenizer.encode_rendered(rendered.text)
        if len(prompt_ids) > self._max_prompt_tokens:
            text = PROMPT_TOO_LONG.format(most=self._max_prompt_tokens, length=len(prompt_ids))
            raise CallError(text, field="messages")
        return prompt_ids

    def _full(self) -> CallError:
        self._is_full = True
        return CallError(NO_ROOM.format(most=self._context.max_completion_tokens), field="messages")

    def _new_turn(
        self, number: int, request: TurnRequest, rendered: RenderedChat | None
    ) -> AgentTurn:
        parent, context = self._place(request, rendered) if self._turns else (0, ())
        room = self._room() - len(context)
        prompt_ids = self._places.path_ids(parent) + context
        needed = _needed_keys(len(prompt_ids), len(context))
        if room < 1 or not self._has_keys_left(needed):
            raise self._full()
        stops = self._stops(request)
        room = min(room, request.max_tokens or room)
        return AgentTurn(number, request, parent, context, prompt_ids, stops, room, rendered)

    def _place(
        self, request: TurnRequest, rendered: RenderedChat | None
    ) -> tuple[int | None, tuple[int, ...]]:
        if rendered is None:
            return self._places.fork_from(request.token_ids, self._turns.values())
        return self._places.place(rendered, self._turns.values())

    def _resumed(
        self,
        number: int,
        request: TurnRequest,
        rendered: RenderedChat | None,
        stored: StoredTurn,
    ) -> AgentTurn:
        """Return the turn of a call whose tokens, or some of them, are in the log."""
        begin = stored.stretches[0][0]
        context = self._transcript.tokens(stored.begin, begin)
        prompt_ids = self._places.path_ids(stored.parent) + context
        stops = self._stops(request)
        room = self._context.max_completion_tokens - self.length
        turn = AgentTurn(number, request, stored.parent, context, prompt_ids, stops, 0, rendered)
        for stretch in stored.stretches:
            ids, logprobs = self._transcript.tokens(*stretch), self._transcript.logprobs(*stretch)
            turn.tokens.append_sampled(ids, logprobs, ())
        room += len(turn.tokens)
        turn.room = min(room, request.max_tokens or room)
        turn.num_written, turn.has_begun = len(turn.tokens), True
        turn.end = stored.stretches[-1][1]
        if turn.end == self.length:
            self._writer = turn
        return turn

    def _stops(self, request: TurnRequest) -> StopStrings | None:
        shared = self._context.stops
        strings = (*(shared.strings if shared is not None else ()), *request.stops)
        return StopStrings(strings, self._tokenizer.decode) if strings else None

    def _request_id(self, turn: AgentTurn) -> str:
        return f"{self.lease.task_id}.{self.lease.fence}.{turn.number}"

    def _request(self, turn: AgentTurn) -> GenerationRequest:
        spec, tokens = self.lease.spec, turn.tokens.tokens()
        return GenerationRequest(
            request_id=self._request_id(turn),
            token_ids=turn.prompt_ids + tokens,
            max_tokens=turn.room - len(tokens),
            temperature=spec.temperature,
            stop_token_ids=self._stop_token_ids(turn),
            stop_strings=turn.stops,
            turn=tokens,
            stream=(spec.seed + turn.number - 1, self.lease.task_id),
        )

    def _stop_token_ids(self, turn: AgentTurn) -> tuple[int, ...]:
        return (*self._tokenizer.stop_token_ids, *turn.request.stop_token_ids)

    # ----------------------------------------------------------------------------------------------
    # Tokens.

    def _room(self) -> int:
        """Tokens that the log has room for, beside those that wait."""
        waiting = sum(turn.num_waiting for turn in self._open.values())
        return self._context.max_completion_tokens - self.length - waiting

    def _note_end(self, turn: AgentTurn) -> None:
        tokens = turn.tokens.tokens()
        has_token = bool(tokens) and tokens[-1] in self._stop_token_ids(turn)
        has_string = turn.stops is not None and turn.stops.find_end(tokens, max(0, len(tokens) - 1))
        turn.is_cut = not has_token and not has_string
        if tokens and (not turn.is_cut or len(tokens) >= turn.room):
            turn.is_over = True

    def _write(self) -> None:
        """Write the tokens whose turn it is, and answer turns that are whole."""
        for turn in list(self._open.values()):
            if turn.is_over and not len(turn.tokens):  # others have taken its room
                self._refuse_from(turn.number)
                return
            if not turn.has_begun and not len(turn.tokens):
                return  # turns begin in order
            if not turn.has_begun:
                self._begin(turn)
            if turn.num_waiting and self._may_write(turn):
                self._append(turn)
            if turn.is_over:
                self._answer(turn)

    def _refuse_from(self, number: int) -> None:
        """Refuse a turn without tokens for want of room, and all later ones, as on a resumption."""
        error = TurnReply(0, encode_reply(AgentError(400, self._full().text, "messages")))
        for later in [number_ for number_ in self._open if number_ >= number]:
            del self._open[later], self._turns[later]
            self.replies[later] = error

    def _may_write(self, turn: AgentTurn) -> bool:
        writer = self._writer
        if turn.is_over or writer is None or writer is turn or writer.is_over:
            return True
        return not turn.num_written or (
            turn.num_waiting >= ALTERNATE_TOKENS and self._has_keys_left(turn.length)
        )

    def _has_keys_left(self, needed: int) -> bool:
        """Whether the record may have further stretches, and all that open turns still need."""
        num_prompt = len(self._places.prompt)
        needed += self._transcript.attended_keys(num_prompt)
        for turn in self._open.values():
            needed += _needed_keys(turn.length, turn.num_waiting)
        return needed <= KEYS_PER_TOKEN * (num_prompt + self.length)

    def _begin(self, turn: AgentTurn) -> None:
        if self.length:
            self._transcript.branch(turn.parent)
            self._transcript.sign(self.lease.fence, self._context.incarnation)
            self._transcript.append_observation(turn.context)
        turn.end, turn.has_begun = self.length, True

    def _append(self, turn: AgentTurn) -> None:
        if turn.num_written and turn.end != self.length:
            self._transcript.branch(turn.end)
        part = turn.tokens.completion(turn.num_written)
        self._transcript.sign(self.lease.fence, self._context.incarnation)
        self._transcript.append_sampled(
            part.token_ids.tolist(), part.behaviour_logprobs.tolist(), part.versions
        )
        turn.num_written, turn.end = len(turn.tokens), self.length
        self._writer = turn

    def _answer(self, turn: AgentTurn, *, is_said: bool = False) -> None:
        """Make the reply of a turn that is whole in the log."""
        tokens, request = turn.tokens.tokens(), turn.request
        ends_with_token = tokens[-1] in self._stop_token_ids(turn)
        text = self._tokenizer.decode(tokens[: len(tokens) - ends_with_token])
        if turn.stops is not None:
            text = turn.stops.cut(text)
        after = turn.rendered.text.rstrip() if turn.rendered else ""
        answer, turn.message = answer_of(
            request,
            text,
            number=turn.number,
            is_cut=turn.is_cut,
            shows_reasoning=self._tokenizer.shows_reasoning,
            is_thinking=after.endswith(BEGIN_OF_THINKING),
            begin_of_call=self._tokenizer.begin_of_call if request.has_tools else None,
        )
        if not is_said:
            completion, decode = turn.tokens.completion(), self._tokenizer.decode
            of_tokens = token_fields(request, turn.prompt_ids, completion, decode)
            reply = _encoded(msgspec.structs.replace(answer, **of_tokens))
            self.replies[turn.number] = TurnReply(turn.end, reply)
        self._places.note(turn)
        self._note_chat(turn)
        self.num_turns += 1
        turn.tokens, turn.prompt_ids, turn.num_written = Transcript(), (), 0
        turn.request, turn.stops = TurnRequest(), None
        del self._open[turn.number]

    def _note_chat(self, turn: AgentTurn) -> None:
        """Keep the longest chat with its answer."""
        chat, message = turn.request.chat, turn.message
        if chat is not None and message is not None:
            place = len(chat.messages), turn.number
            if place > self._longest[:2]:
                self._longest = (*place, chat._replace(messages=[*chat.messages, message]))

    def _said(self) -> list[ChatMessage]:
        """Messages of the longest chat, with the policy's last turn."""
        *_, chat = self._longest
        answered = [turn.message for turn in self._turns.values() if turn.message is not None]
        return said_in(chat if chat.messages else Chat(answered))


def _needed_keys(path: int, num_waiting: int) -> int:
    """Count the keys that stretches of an open turn's path need beyond those of waiting tokens."""
    return max(0, STRETCHES * path - KEYS_PER_TOKEN * num_waiting)


def _encoded(reply: AgentReply) -> bytes:
    try:
        return encode_reply(reply)
    except RecordError as error:
        return encode_reply(AgentError(500, str(error)[:MAX_ERROR]))
