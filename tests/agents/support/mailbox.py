"""A mailbox in memory, with the verdicts of the store's scripts, and a model that answers calls.

It stands in for broker and store where the door is tested: the messages are those of a real broker,
and bodies are put together from parents as an actor does it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import numpy as np

from broker.protocol.agent_calls import (
    AgentAnswer,
    AgentCall,
    AgentReply,
    decode_call,
    encode_reply,
)
from broker.protocol.conversation_messages import (
    CallRequest,
    End,
    EndRequest,
    Replies,
    RepliesReply,
    RepliesRequest,
    StoredReply,
    TakeReply,
    TakeRequest,
    Ticket,
)
from broker.protocol.messages import TaskSpec, TaskVerdict, Verdict, Verdicts
from buffer.operations.conversations import MAX_CALLS, MAX_OPEN_CALLS

SPEC = TaskSpec(0, 0, 7, "train", 1.0)
Model = Callable[[AgentCall, int], Awaitable[AgentReply]]


def tokens(*ids: int) -> bytes:
    return np.array(ids, "<i4").tobytes()


def logprobs(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()


async def say_hello(_call: AgentCall, number: int) -> AgentReply:
    return AgentAnswer("stop", 5, 2, text=f"hello {number}")


@dataclass
class Box:
    """One conversation."""

    ticket: int
    tails: list[bytes] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    lines: list[tuple[int, int, bytes]] = field(default_factory=list)
    replies: list[StoredReply] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    verdict: Verdict = Verdict.OK

    @property
    def is_over(self) -> bool:
        return any(end.why for end in self.ends)


class TwinMailbox:
    """Conversations that wait for hosts, and the model behind them."""

    def __init__(self, model: Model = say_hello, *, tasks: int = 0, payload: bytes = b"{}") -> None:
        self.model, self.payload = model, payload
        self.wanted = list(range(1, tasks + 1))
        self.boxes: dict[int, Box] = {}
        self.num_refused = 0
        self.is_done = False
        self._news = asyncio.Event()
        self._answering: set[asyncio.Task[None]] = set()

    def ticket(self, task: int) -> Ticket:
        """Take one conversation."""
        self.boxes[task] = Box(100 + task)
        return Ticket(task, 100 + task, SPEC, self.payload)

    async def take(self, request: TakeRequest, *, deadline_s: float = 0.0) -> TakeReply:
        if not self.wanted:
            if self.is_done and all(box.is_over for box in self.boxes.values()):
                return TakeReply("DONE", (), 15.0)
            await asyncio.sleep(min(request.wait_s, 0.05))
            return TakeReply("WAIT", (), 15.0)
        taken, self.wanted = self.wanted[: request.n], self.wanted[request.n :]
        return TakeReply("OK", tuple(map(self.ticket, taken)), 15.0)

    async def call(self, request: CallRequest, *, deadline_s: float = 0.0) -> Verdicts:
        (call,) = request.calls
        box = self.boxes[call.task_id]
        line = (call.parent, call.keep, call.tail)
        verdict = box.verdict
        if call.ticket != box.ticket:
            verdict = Verdict.OUTDATED
        elif call.number <= len(box.lines):
            verdict = Verdict.DUP if box.lines[call.number - 1] == line else Verdict.OTHER
        elif call.number > len(box.lines) + 1:
            verdict = Verdict.GAP
        elif box.is_over:
            verdict = Verdict.ENDED
        elif len(box.lines) - len(box.replies) >= MAX_OPEN_CALLS:
            verdict = Verdict.BUSY
        elif len(box.lines) >= MAX_CALLS:
            verdict = Verdict.FULL
        if verdict is Verdict.OK:
            kept = box.bodies[call.parent - 1][: call.keep] if call.parent else b""
            assert len(kept) == call.keep
            box.bodies.append(kept + call.tail)
            box.lines.append(line)
            self._start(box, call.number, decode_call(box.bodies[-1]))
        return Verdicts((TaskVerdict(call.task_id, verdict, len(box.lines)),))

    async def hear(self, request: RepliesRequest, *, deadline_s: float = 0.0) -> RepliesReply:
        ends_at = asyncio.get_running_loop().time() + request.wait_s
        while True:
            self._news.clear()
            found = []
            for line in request.conversations:
                box = self.boxes[line.task_id]
                new = tuple(reply for reply in box.replies if reply.stamp > line.heard)
                if new or box.verdict is not Verdict.OK or line.num_calls > len(box.lines):
                    number = len(box.lines)
                    found.append(Replies(line.task_id, line.ticket, box.verdict, number, new))
            left_s = ends_at - asyncio.get_running_loop().time()
            if found or left_s <= 0:
                return RepliesReply(tuple(found))
            try:
                async with asyncio.timeout(left_s):
                    await self._news.wait()
            except TimeoutError:
                pass

    async def end(self, request: EndRequest, *, deadline_s: float = 0.0) -> Verdicts:
        return Verdicts(tuple(TaskVerdict(end.task_id, self._end(end)) for end in request.ends))

    def _end(self, end: End) -> Verdict:
        box = self.boxes[end.task_id]
        orders = [known.order for known in box.ends if known.number == end.number]
        if box.is_over or (not end.why and end.order in orders):
            return Verdict.DUP
        box.ends.append(end)
        return Verdict.OK

    def lose(self, task: int) -> None:
        """Lose a conversation, as a store that was set back does."""
        self.boxes[task].verdict = Verdict.GONE
        self._news.set()

    def _start(self, box: Box, number: int, call: AgentCall) -> None:
        async def answer() -> None:
            reply = encode_reply(await self.model(call, number))
            box.replies.append(StoredReply(len(box.replies) + 1, number, reply))
            self._news.set()

        task = asyncio.create_task(answer())
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def close(self) -> None:
        """End the model's work."""
        for task in self._answering:
            task.cancel()
        await asyncio.gather(*self._answering, return_exceptions=True)
