"""Host of agents: takes conversations of a run, starts an agent for each, and serves their door.

    take tickets ──▶ start the agent ──▶ its requests, through the door ──▶ its end ──▶ END
         ▲                                                                    │
         └────────────────────────── a place is free ◀────────────────────────┘

Waits for tickets and for replies, each in a long poll of the mailbox, and for agents. A host that
stops takes no more tickets; conversations that have not ended within the grace end with the reason
`host`, which charges nobody. An end is sent until the run has it; a host that stops tries it once.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import math
import os
import random
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import structlog

from broker.protocol.conversation_messages import RepliesRequest, TakeReply, TakeRequest
from broker.transport.sockets import reachable
from configs.errors import DeadlineError, SettingsError, first_error
from configs.settings import AgentSettings

from .conversation import AgentConversation, AgentEnd, HostedConversations, Mailbox
from .door import Door
from .process import (
    AgentProcess,
    MemoryMeter,
    SharedProcess,
    environment_of,
    shared_environment,
)

LONG_POLL_S = 2.0
POLLS_PER_TICKET = 4  # a lost request or answer costs no ticket
STARTED_S = 5.0
"""An agent that has not failed to start for so long has started."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0  # after an agent that could not be started
PAUSE_S = 0.5  # after an answer without conversations, or an error
DONE, RESTS = "DONE", "RESTS"

log = structlog.get_logger()
Awaited = TypeVar("Awaited")
Show = Callable[[str], None]


class StartPause:
    """When a host that could not start an agent tries again: after twice as long each time.

    Args:
        clock: Returns seconds.
        jitter: Returns a share from 0 to 1 of half the pause, which it is shorter by.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._clock, self._jitter = clock, jitter
        self._num_failed, self._failed_at, self._until = 0, 0.0, 0.0

    @property
    def has_failed(self) -> bool:
        """Whether no agent that began after the last failure has been started."""
        return self._num_failed > 0

    @property
    def left_s(self) -> float:
        """Time until the next try."""
        return max(0.0, self._until - self._clock()) if self._num_failed else 0.0

    def begin(self) -> None:
        """Begin a pause, after a failure or with the next try."""
        longest_s = min(FIRST_PAUSE_S * 2.0 ** min(self._num_failed - 1, 9), LONGEST_PAUSE_S)
        self._until = self._clock() + longest_s * (1 - self._jitter() / 2)

    def note_failure(self, began: float, reason: str) -> None:
        """Note an agent that could not be started; those that began together count as one."""
        if self._num_failed and began < self._failed_at:
            return
        if not self._num_failed:
            log.error("this host cannot start its agents, and tries again", reason=reason)
        self._num_failed += 1
        self._failed_at = self._clock()
        self.begin()

    def note_start(self, began: float) -> None:
        """Note an agent that was started, which ends the pauses if it began behind the failure."""
        if self._num_failed and began >= self._failed_at:
            log.info("this host starts agents again")
            self._num_failed = 0


class AgentHost:
    """Conversations of one host.

    Args:
        mailbox: Mailbox of the run.
        agents: Settings.
        drain_s: Time for conversations under way after `stop`.
        command: Words of the agents' command.
        python: Python of a virtual environment for the agents.
        show: Prints a line for each conversation instead of starting the command.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        agents: AgentSettings,
        *,
        drain_s: float,
        command: tuple[str, ...] = (),
        python: Path | None = None,
        show: Show | None = None,
    ) -> None:
        self._mailbox, self._agents = mailbox, agents
        self._command, self._python, self._show = command, python, show
        self._drain_s = drain_s
        self._conversations = HostedConversations()
        self._has_new, self._has_room = asyncio.Event(), asyncio.Event()
        self._meter = MemoryMeter()
        self._shared = SharedProcess(self._shared_agent) if agents.serves_many else None
        self._newest = 0
        """Newest ticket."""
        self._start_pause = StartPause()
        self._poll_s = LONG_POLL_S
        self._address = ""

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until the run ends or `stop` is set.

        Raises:
            SettingsError: The door cannot be opened.
            RefusedError: The run refuses this host.
        """
        door, most = Door(self._conversations), self._agents.max_conversations
        with _listener(self._agents.listen) as listener:
            self._address = _address_of(listener, self._agents.listen)
            async with door.serving(listener, most=most):
                log.info("the door is open", stage="hosting agents", address=self._address)
                await self.serve(stop)

    async def serve(self, stop: asyncio.Event) -> None:
        """Do the same beside a door that is open already.

        Raises:
            RefusedError: The run refuses this host.
        """
        try:
            async with asyncio.TaskGroup() as beside:
                polling = beside.create_task(self._poll())
                async with asyncio.TaskGroup() as agents:
                    if await self._take(agents, stop):
                        await self._drain(self._drain_s, "its host was stopped")
                    else:  # nobody answers any more
                        await self._drain(0.0, "the run has ended")
                if self._shared is not None:
                    await self._shared.close()
                polling.cancel()
        except BaseExceptionGroup as group:
            raise first_error(group) from group

    async def _take(self, agents: asyncio.TaskGroup, stop: asyncio.Event) -> bool:
        """Take conversations while there are places, until `stop`.

        Returns:
            Whether the run goes on.
        """
        stopped = asyncio.create_task(stop.wait())
        try:
            while not stop.is_set():
                if (left_s := self._start_pause.left_s) > 0:
                    await first_of(asyncio.sleep(left_s), stopped)
                    continue
                free = self._agents.max_conversations - len(self._conversations.under_way)
                if free == 0:
                    self._has_room.clear()
                    await first_of(self._has_room.wait(), stopped)
                    continue
                n = 1 if self._start_pause.has_failed else free
                request = TakeRequest(n, self._newest, LONG_POLL_S)
                answer = await first_of(self._answered(self._mailbox.take(request)), stopped)
                if answer is not None and answer.status == DONE:
                    log.info("the run has ended")
                    return False
                if answer is not None:
                    self._begin(answer, agents)
                if self._start_pause.has_failed:
                    self._start_pause.begin()
                if answer is None or not answer.tickets:
                    rest_s = answer.rest_s if answer is not None else 0.0
                    await first_of(asyncio.sleep(max(PAUSE_S, rest_s)), stopped)
            return True
        finally:
            stopped.cancel()

    def _begin(self, answer: TakeReply, agents: asyncio.TaskGroup) -> None:
        """Start an agent for each conversation that was taken."""
        if answer.status == RESTS:
            log.warning(
                "this host rests, because its agents end without a call; correct agents.command",
                agents=answer.num_silent,
                rest_s=answer.rest_s,
            )
        self._poll_s = min(LONG_POLL_S, answer.ticket_timeout_s / POLLS_PER_TICKET)
        for ticket in answer.tickets:
            self._newest = max(self._newest, ticket.ticket)
            conversation = AgentConversation(ticket, self._mailbox)
            self._conversations.begin(conversation)
            agents.create_task(self._converse(conversation))
            self._has_new.set()

    async def _drain(self, drain_s: float, reason: str) -> None:
        """Wait so long for conversations under way, then end the rest with a reason."""
        try:
            async with asyncio.timeout(drain_s):
                while self._conversations.under_way:
                    self._has_room.clear()
                    await self._has_room.wait()
        except TimeoutError:
            rest = list(self._conversations.under_way.values())
            log.warning("ending conversations that are under way", count=len(rest))
            async with asyncio.TaskGroup() as ends:
                for conversation in rest:
                    conversation.give_up()
                    ends.create_task(conversation.finish(AgentEnd("host", reason)))

    async def _converse(self, conversation: AgentConversation) -> None:
        """Run a conversation's agent to its end."""
        began, note_start = time.monotonic(), self._start_pause.note_start
        started = asyncio.get_running_loop().call_later(STARTED_S, note_start, began)
        try:
            end = await self._run_agent(conversation)
            note_start(began)
        except (OSError, ValueError) as error:
            end = AgentEnd("host", f"its host could not start it: {error}")
            self._start_pause.note_failure(began, str(error))
        finally:
            started.cancel()
        if end.why not in {"ended", "host"} and not conversation.over.is_set():
            log.warning("agent ended", task=conversation.name, why=end.why, reason=end.text)
        await conversation.finish(end)
        self._conversations.end(conversation)
        self._has_room.set()

    async def _run_agent(self, conversation: AgentConversation) -> AgentEnd:
        url, key = f"{self._address}/conversations/{conversation.name}", conversation.key
        task, timeout_s = conversation.ticket.payload, self._agents.timeout_s
        line = json.dumps({"url": f"{url}/v1", "key": key, "task": json.loads(task or b"null")})
        if self._show is not None:
            self._show(line)
            try:
                async with asyncio.timeout(timeout_s):
                    await conversation.over.wait()
            except TimeoutError:
                return AgentEnd("timeout", f"no end within {timeout_s:g} s")
            return AgentEnd("ended")
        if self._shared is not None:
            return await self._shared.hold(line, conversation.over, timeout_s=timeout_s)
        process = AgentProcess(
            self._command,
            environment_of(url, key, task, python=self._python, inherited=os.environ),
            timeout_s=timeout_s,
            memory_bytes=self._memory_bytes,
            meter=self._meter,
        )
        return await process.run(conversation.over)

    def _shared_agent(self, stdin: int) -> AgentProcess:
        return AgentProcess(
            self._command,
            shared_environment(self._address, python=self._python, inherited=os.environ),
            timeout_s=math.inf,
            memory_bytes=self._memory_bytes,
            meter=self._meter,
            stdin=stdin,
        )

    @property
    def _memory_bytes(self) -> int | None:
        memory_mb = self._agents.memory_mb
        return None if memory_mb is None else memory_mb * 2**20

    async def _poll(self) -> None:
        """Renew tickets and fetch replies for all conversations, for ever."""
        async with asyncio.TaskGroup() as repeats:
            while True:
                self._has_new.clear()
                under_way = {
                    (one.ticket.task_id, one.ticket.ticket): one
                    for one in self._conversations.under_way.values()
                    if not one.is_settled
                }
                if not under_way:
                    await self._has_new.wait()
                    continue
                lines = tuple(one.where() for one in under_way.values())
                hearing = self._answered(self._mailbox.hear(RepliesRequest(lines, self._poll_s)))
                new = asyncio.create_task(self._has_new.wait())
                try:
                    answer = await first_of(hearing, new)
                finally:
                    new.cancel()
                for replies in answer.conversations if answer else ():
                    conversation = under_way[replies.task_id, replies.ticket]
                    if conversation.take_replies(replies):
                        repeats.create_task(conversation.repeat_calls(replies.num_calls + 1))
                if answer is None and not self._has_new.is_set():
                    await asyncio.sleep(PAUSE_S)

    async def _answered(self, asked: Awaitable[Awaited]) -> Awaited | None:
        """Return an answer of the mailbox; None where there is none."""
        try:
            return await asked
        except DeadlineError as error:
            log.warning("the run does not answer", reason=str(error))
            return None


def _listener(address: str) -> socket.socket:
    """Listen at `HOST:PORT`; port 0 = a free one.

    Raises:
        SettingsError: That is not possible.
    """
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    is_dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    at = host.strip("[]"), int(port)
    try:
        return socket.create_server(at, family=family, backlog=256, dualstack_ipv6=is_dual)
    except (OSError, OverflowError) as error:
        raise SettingsError(
            f"agents.listen must be an address of this machine with a free port, got {address}: "
            f"{getattr(error, 'strerror', None) or error}; change it, or use port 0"
        ) from None


def _address_of(listener: socket.socket, listen: str) -> str:
    """Return the address for agents, which may be in containers where a host listens everywhere.

    Raises:
        SettingsError: It listens everywhere, and the machine has no address for others.
    """
    address, port = listener.getsockname()[:2]
    if not ipaddress.ip_address(address).is_unspecified:
        return f"http://{listen.rpartition(':')[0]}:{port}"
    everywhere = f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"
    return f"http{reachable(everywhere).removeprefix('tcp')}"


async def first_of(work: Awaitable[Awaited], other: asyncio.Task[object]) -> Awaited | None:
    """Await some work; cancel it and return None if another task ends before it."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task, other}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})  # unlike `await task`, it tells our own cancellation apart
