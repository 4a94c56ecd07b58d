"""A door that serves on a free loopback port, over a mailbox in memory."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import openai

from agents.conversation import AgentConversation, HostedConversations
from agents.door import Door
from broker.protocol.conversation_messages import RepliesRequest
from tests.agents.support.mailbox import Model, TwinMailbox, say_hello


@dataclass
class OpenedDoor:
    mailbox: TwinMailbox
    port: int
    conversations: HostedConversations
    clients: list[openai.AsyncOpenAI] = field(default_factory=list)

    def conversation(self, task: int = 1) -> AgentConversation:
        """Begin a conversation."""
        conversation = AgentConversation(self.mailbox.ticket(task), self.mailbox)
        self.conversations.begin(conversation)
        return conversation

    def url(self, conversation: AgentConversation) -> str:
        return f"http://127.0.0.1:{self.port}/conversations/{conversation.name}"

    def client(self, conversation: AgentConversation, **changes: Any) -> openai.AsyncOpenAI:
        options: dict[str, Any] = {"max_retries": 0, **changes}
        client = openai.AsyncOpenAI(
            base_url=f"{self.url(conversation)}/v1", api_key=conversation.key, **options
        )
        self.clients.append(client)
        return client

    async def hear(self) -> None:
        """Fetch replies, as a host does."""
        while True:
            by_task = {one.ticket.task_id: one for one in self.conversations.under_way.values()}
            lines = tuple(one.where() for one in by_task.values() if not one.over.is_set())
            answer = await self.mailbox.hear(RepliesRequest(lines, 0.02))
            for replies in answer.conversations:
                by_task[replies.task_id].take_replies(replies)
            await asyncio.sleep(0)


@asynccontextmanager
async def opened(model: Model = say_hello, *, body_s: float = 30.0) -> AsyncIterator[OpenedDoor]:
    mailbox = TwinMailbox(model, payload=b'{"question": "2+3?"}')
    conversations = HostedConversations()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = OpenedDoor(mailbox, listener.getsockname()[1], conversations)
        async with Door(conversations, body_s=body_s).serving(listener, most=4):
            hearing = asyncio.create_task(here.hear())
            try:
                yield here
            finally:
                for client in here.clients:
                    await client.close()
                hearing.cancel()
                await asyncio.gather(hearing, return_exceptions=True)
                await mailbox.close()
