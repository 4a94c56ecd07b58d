"""An actor and a host of agents that talk through a broker."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from broker.client import BrokerClient
from broker.protocol.conversation_messages import (
    Call,
    CallRequest,
    Calls,
    End,
    EndRequest,
    Hear,
    Listen,
    ListenRequest,
    Replies,
    RepliesRequest,
    Say,
    SayRequest,
    StoredReply,
    TakeRequest,
    Ticket,
    Want,
    WantRequest,
)
from broker.protocol.messages import Beat, Lease, LeaseRequest, TaskVerdict, Verdict
from broker.transport.allow_list import Role, add
from broker.transport.keys import KeyPair, load_pair
from buffer.record.codec import encode_completion
from tests.broker.support.records import completion
from tests.broker.support.ring import FIRST, Ring, ring
from tests.waiting import until

TOKENS = 3

agent_ring = partial(ring, environment="agent")
"""A broker of a run with live agents."""


def host_pair(keys: Path, name: str) -> KeyPair:
    """The key pair of a host, made and allowed at first use."""
    if not (keys / f"{name}.key").exists():
        add(keys, name, Role.HOST)
    return load_pair(keys, name)


def host_of(here: Ring, name: str = "host-1", **changes: Any) -> BrokerClient:
    """A client with a host's key."""
    return here.client(name, keys=host_pair(here.keys, name), **changes)


@asynccontextmanager
async def host_program(
    here: Ring, folder: Path, agent: str, **settings: Any
) -> AsyncIterator[Process]:
    """`python -m agents` at a broker, whose agents run this program; killed if it has not ended."""
    add(here.keys, "host", Role.HOST)
    (folder / "agent.py").write_text(agent)
    config = {
        "run": {"name": "test", "model": "init", "environment": "agent"},
        "broker": {"endpoint": here.endpoint, "keys": str(here.keys)},
        "agents": {"command": [sys.executable, str(folder / "agent.py")], **settings},
    }
    (folder / "config.yaml").write_text(json.dumps(config))
    host = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "agents", "--config", str(folder / "config.yaml")),
        cwd=Path(__file__).parents[3],
    )
    try:
        yield host
    finally:
        if host.returncode is None:
            host.kill()


class ActorSide:
    """One lease whose turns an agent makes."""

    def __init__(self, client: BrokerClient, lease: Lease) -> None:
        self.client, self.lease = client, lease
        self.ticket = self.num_calls = 0
        self.length = lease.length

    @classmethod
    async def begin(cls, client: BrokerClient, *, payload: bytes = b"told") -> ActorSide:
        """Lease a task and want an agent for it."""
        (lease,) = (await client.lease(LeaseRequest(1, FIRST), deadline_s=20)).leases
        actor = cls(client, lease)
        await client.want(WantRequest((Want(lease.task_id, lease.fence, payload),)))
        return actor

    async def listen(self, wait_s: float = 2.0) -> Calls | None:
        """Wait for the next calls; None if there are none."""
        line = Listen(self.lease.task_id, self.lease.fence, self.ticket, self.num_calls)
        reply = await self.client.listen(ListenRequest((line,), wait_s), deadline_s=60)
        if not reply.tasks:
            return None
        (calls,) = reply.tasks
        self.ticket, self.num_calls = calls.ticket, self.num_calls + len(calls.calls)
        return calls

    async def say(
        self, number: int, reply: bytes, *, offset: int | None = None, turn_end: int | None = None
    ) -> TaskVerdict:
        """Answer a call with a turn of a few tokens."""
        if not self.ticket:
            self.ticket = await self._first_ticket()
        at = self.length if offset is None else offset
        chunk = encode_completion(completion(self.lease.fence, TOKENS))
        beat = Beat(self.lease.task_id, self.lease.fence, at, TOKENS, chunk)
        say = Say(beat, self.ticket, number, at + TOKENS if turn_end is None else turn_end, reply)
        request = SayRequest((say,), FIRST)
        (line,) = (await self.client.say(request, deadline_s=60)).verdicts
        if line.verdict in {Verdict.OK, Verdict.DUP}:
            self.length = line.length
        return line

    async def _first_ticket(self) -> int:
        line = Listen(self.lease.task_id, self.lease.fence)
        reply = await self.client.listen(ListenRequest((line,)), deadline_s=60)
        return reply.tasks[0].ticket if reply.tasks else 0


class HostSide:
    """One conversation of a host."""

    def __init__(self, client: BrokerClient, ticket: Ticket) -> None:
        self.client, self.ticket = client, ticket
        self.number = self.heard = 0

    @classmethod
    async def begin(cls, client: BrokerClient) -> HostSide:
        """Take a conversation."""

        async def taken() -> tuple[Ticket, ...]:
            return (await client.take(TakeRequest(1, wait_s=0.5), deadline_s=20)).tickets

        (ticket,) = await until(taken, timeout_s=20.0)
        return cls(client, ticket)

    async def call(self, tail: bytes, *, keep: int = 0) -> Verdict:
        """Make the next call, whose parent is the last one."""
        self.number += 1
        parent = self.number - 1
        call = Call(
            self.ticket.task_id,
            self.ticket.ticket,
            self.number,
            parent,
            keep if parent else 0,
            tail,
        )
        (line,) = (await self.client.call(CallRequest((call,)), deadline_s=60)).verdicts
        return line.verdict

    async def hear(self, wait_s: float = 2.0, *, num_calls: int = 0) -> Replies | None:
        """Wait for replies; None if there are none."""
        line = Hear(self.ticket.task_id, self.ticket.ticket, self.heard, num_calls)
        reply = await self.client.hear(RepliesRequest((line,), wait_s), deadline_s=60)
        if not reply.conversations:
            return None
        (replies,) = reply.conversations
        self.heard = max([self.heard, *(reply.stamp for reply in replies.replies)])
        return replies

    async def ask(self, tail: bytes) -> StoredReply:
        """Call, and wait for the reply."""
        assert await self.call(tail) in {Verdict.OK, Verdict.DUP}
        while True:
            found = await self.hear()
            if found is not None:
                assert found.verdict is Verdict.OK, found
                (reply,) = found.replies
                return reply

    async def end(self, reward: float | None = 1.0, **changes: Any) -> Verdict:
        """End it with a reward."""
        end = End(
            self.ticket.task_id,
            self.ticket.ticket,
            reward=reward,
            **{"heard": self.heard, "why": "ended", **changes},
        )
        (line,) = (await self.client.end(EndRequest((end,)), deadline_s=60)).verdicts
        return line.verdict


async def answer_all(actor: ActorSide, turns: int) -> None:
    """Answer each call with its own body, until the conversation has ended."""
    said = 0
    while said < turns:
        calls = await actor.listen()
        for call in calls.calls if calls is not None else ():
            said += 1
            line = await actor.say(said, b"re: " + call.tail)
            assert line.verdict in {Verdict.OK, Verdict.DUP}, line
