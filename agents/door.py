"""The door: an HTTP server beside the agents, with OpenAI's routes for each conversation.

    POST /conversations/ID/v1/chat/completions       messages in, a completion out, also streamed
    POST /conversations/ID/inference/v1/generate     tokens in, tokens out
    GET  /conversations/ID/v1/models[/NAME]          the model of the run, under any name
    GET  /conversations/ID/task                      what the agent is asked, JSON
    POST /conversations/ID/reward                    a reward, of the whole or of a call; the end

Each conversation has a key of its own, which is checked before a body is read, and which opens
nothing once the conversation is over. A request waits for its reply for as long as the conversation
goes on. Bodies, their time, connections and headers are bounded, and so are the requests that a
conversation has under way. Whose a connection is, only its request tells: where there are too many
connections, one without a request makes room.
"""

from __future__ import annotations

import asyncio
import math
import socket
from asyncio import to_thread
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any, ClassVar

import h11
import msgspec
import structlog
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from broker.protocol.agent_calls import MAX_BODY_BYTES, AgentAnswer, AgentError

from .answers import (
    WAITING,
    completion,
    error_body,
    error_event,
    events,
    generated,
    model,
    models,
)
from .call_log import OpenCall
from .conversation import BUSY_S, AgentConversation, HostedConversations, as_error, over_error
from .requests import MAX_MODEL, AgentRequest, RequestError, read_chat, read_generate, read_reward

KEEP_ALIVE_S = 3.0
"""Pause between comments of a stream; before the first, an error still has its own status."""
BODY_S = 30.0  # 8 MiB at 280 kB/s, on loopback
SEND_S = 30.0  # without a byte that the agent reads
HEADERS_S = 10.0
MAX_READ_BYTES = 2 * MAX_BODY_BYTES
"""A longer body is not read to its end, so its connection is cut."""
SHORT_BODY_BYTES = 2**18
"""A longer body is read in a thread: 8 MiB take 100 ms, most of it in steps of 20 ms."""
MAX_HEADER_BYTES = 64 * 1024
CONNECTIONS_PER_CONVERSATION = 64  # twice its open calls
CLOSE = {"Connection": "close"}
"""Header of answers to requests whose bodies are not read to their ends."""

log = structlog.get_logger()
Serve = Callable[[Request, AgentConversation], Awaitable[Response]]


class Door:
    """Serves conversations, which its owner begins and ends.

    Args:
        conversations: Conversations of the host.
        body_s: Longest time of a request's body.
    """

    def __init__(self, conversations: HostedConversations, *, body_s: float = BODY_S) -> None:
        self._conversations = conversations
        self._body_s = body_s
        routes = (
            ("/v1/chat/completions", "POST", self._chat),
            ("/inference/v1/generate", "POST", self._generate),
            ("/v1/models", "GET", self._models),
            ("/v1/models/{model:path}", "GET", self._model),
            ("/task", "GET", self._task),
            ("/reward", "POST", self._reward),
        )
        self.app = Starlette(
            routes=[
                Route("/conversations/{name}" + path, self._guarded(serve), methods=[method])
                for path, method, serve in routes
            ],
            exception_handlers={404: _not_found, 405: _not_found},  # starlette's are plain texts
        )
        self.app.router.redirect_slashes = False  # to an address that is made of the Host header

    @asynccontextmanager
    async def serving(self, listener: socket.socket, *, most: int) -> AsyncIterator[None]:
        """Serve while the context is open.

        Args:
            listener: Socket that listens.
            most: Most conversations at a time.
        """
        config = uvicorn.Config(
            self.app,
            http=type("Guarded", (_Guarded,), {"most": most * CONNECTIONS_PER_CONVERSATION}),
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            lifespan="off",
            log_config=None,
            log_level="error",  # not a line for each request that is no HTTP
            access_log=False,
            ws="none",
            timeout_graceful_shutdown=1,
            timeout_keep_alive=math.ceil(2 * HEADERS_S),  # what clients keep for 5 s, they end
        )
        server = _DoorServer(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield
        finally:
            server.should_exit = True
            await serving

    def _guarded(self, serve: Serve) -> Callable[[Request], Awaitable[ASGIApp]]:
        async def endpoint(request: Request) -> ASGIApp:
            try:
                name = request.path_params["name"]
                conversation = self._conversations.find(name, _key_of(request))
                if conversation.num_requests >= CONNECTIONS_PER_CONVERSATION:
                    raise _too_many_requests()
            except RequestError as error:
                return _error(error, CLOSE)

            async def answer(scope: Scope, receive: Receive, send: Send) -> None:
                conversation.num_requests += 1
                try:
                    response = await _served(serve, request, conversation)
                    await response(scope, receive, send)
                finally:
                    conversation.num_requests -= 1

            return answer

        return endpoint

    async def _chat(self, request: Request, conversation: AgentConversation) -> Response:
        wanted, call = await self._call(request, conversation, read_chat)
        if wanted.is_streamed:
            return await _stream(wanted, call, conversation)
        answer = await _answer(request, call, conversation)
        if answer is None:
            return Response(status_code=499)
        return _json(completion(wanted, answer, call.number, call.at))

    async def _generate(self, request: Request, conversation: AgentConversation) -> Response:
        _, call = await self._call(request, conversation, read_generate)
        answer = await _answer(request, call, conversation)
        if answer is None:
            return Response(status_code=499)
        return _json(generated(answer, call.number))

    async def _models(self, _request: Request, _conversation: AgentConversation) -> Response:
        return _json(models())

    async def _model(self, request: Request, _conversation: AgentConversation) -> Response:
        return _json(model(request.path_params["model"][:MAX_MODEL]))

    async def _task(self, _request: Request, conversation: AgentConversation) -> Response:
        return Response(conversation.ticket.payload, media_type="application/json")

    async def _reward(self, request: Request, conversation: AgentConversation) -> Response:
        async with conversation.bodies:
            wanted = read_reward(await self._body(request))
        await conversation.reward(wanted)
        return _json({"ok": True})

    async def _call(
        self,
        request: Request,
        conversation: AgentConversation,
        read: Callable[[bytes], AgentRequest],
    ) -> tuple[AgentRequest, OpenCall]:
        headers = request.headers
        async with conversation.bodies:
            body = await self._body(request)
            wanted = read(body) if len(body) <= SHORT_BODY_BYTES else await to_thread(read, body)
            call = await conversation.call(
                wanted,
                key=headers.get("idempotency-key", ""),
                is_retry=headers.get("x-stainless-retry-count", "0") != "0",
            )
        return wanted, call

    async def _body(self, request: Request) -> bytes:
        """Read a request's body.

        Raises:
            RequestError: It is too long, or too slow.
        """
        body, length = bytearray(), 0
        try:
            async with asyncio.timeout(self._body_s):
                if _length_of(request) <= MAX_READ_BYTES:
                    async for part in request.stream():
                        length += len(part)
                        if length > MAX_READ_BYTES:
                            break
                        if length <= MAX_BODY_BYTES:
                            body += part
        except TimeoutError:
            text = f"a body must arrive within {self._body_s:g} s, got {len(body)} bytes; try again"
            raise RequestError(408, text, code="slow_body") from None
        if max(length, _length_of(request)) > MAX_BODY_BYTES:
            text = f"a body must be at most {MAX_BODY_BYTES} bytes, got more; cut the messages"
            raise RequestError(413, text, code="body_too_long")
        return bytes(body)


async def _served(serve: Serve, request: Request, conversation: AgentConversation) -> Response:
    try:
        return await serve(request, conversation)
    except RequestError as error:
        return _error(error)
    except ClientDisconnect:
        return Response(status_code=400)


async def _answer(
    request: Request, call: OpenCall, conversation: AgentConversation
) -> AgentAnswer | None:
    """Wait for a reply; None = the agent has cut its connection.

    Raises:
        RequestError: The reply is an error, or the conversation is over.
    """
    with call.waiting():
        cut = asyncio.create_task(_until_cut(request))
        try:
            if not await _until_replied(call, conversation, cut=cut):
                return None
        finally:
            cut.cancel()
        answer = _said(call, conversation)
        call.is_heard = True
        return answer


async def _stream(
    wanted: AgentRequest, call: OpenCall, conversation: AgentConversation
) -> StreamingResponse:
    """Answer with events; an error within the first seconds has its own status.

    Raises:
        RequestError: There was such an error.
    """
    stream = _events(wanted, call, conversation)
    first = await anext(stream)

    async def body() -> AsyncIterator[bytes]:
        async with aclosing(stream):
            yield first
            async for event in stream:
                yield event

    return StreamingResponse(
        body(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
    )


async def _events(
    wanted: AgentRequest, call: OpenCall, conversation: AgentConversation
) -> AsyncGenerator[bytes]:
    with call.waiting():
        is_late = False
        while not await _until_replied(call, conversation, within_s=KEEP_ALIVE_S):
            is_late = True
            yield WAITING
        try:
            answer = _said(call, conversation)
        except RequestError as error:
            if not is_late:
                raise
            yield error_event(error)
            return
        for event in events(wanted, answer, call.number, call.at):
            yield event
        call.is_heard = True


async def _until_replied(
    call: OpenCall,
    conversation: AgentConversation,
    *,
    cut: asyncio.Task[None] | None = None,
    within_s: float | None = None,
) -> bool:
    """Wait for a reply or the conversation's end; False = neither came."""
    over = asyncio.create_task(conversation.over.wait())
    ends: set[asyncio.Future[Any]] = {over, call.reply}
    waiting = ends | ({cut} if cut else set())
    try:
        done, _ = await asyncio.wait(waiting, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        over.cancel()
    return bool(done & ends)


async def _until_cut(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _said(call: OpenCall, conversation: AgentConversation) -> AgentAnswer:
    if not call.reply.done():
        raise over_error(conversation)
    reply = call.reply.result()
    if isinstance(reply, AgentError):
        conversation.open_calls.forget(call, is_retried=reply.status >= 500)
        raise as_error(reply)
    return reply


def _key_of(request: Request) -> str:
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else request.headers.get("x-api-key", "")


def _error(error: RequestError, headers: Mapping[str, str] | None = None) -> Response:
    fields = dict(headers or {})
    if error.status in {408, 413}:
        fields |= CLOSE
    if error.retry_after_s is not None:
        fields["Retry-After"] = str(error.retry_after_s)
    return _json(error_body(error), status=error.status, headers=fields)


def _json(body: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    text = msgspec.json.encode(body)
    return Response(text, status, headers, media_type="application/json")


def _too_many_requests() -> RequestError:
    most = CONNECTIONS_PER_CONVERSATION
    text = f"a conversation must have at most {most} requests under way; wait for answers"
    return RequestError(429, text, code="too_many_requests", retry_after_s=BUSY_S)


def _length_of(request: Request) -> int:
    length = request.headers.get("content-length", "0")
    return int(length) if length.isdecimal() and len(length) < 20 else 0


async def _not_found(request: Request, _: Exception) -> Response:
    text = f"there is no {request.method} {request.url.path[:200]}; see docs/agents.md"
    return _error(RequestError(404, text, code="no_such_route"), CLOSE)


# --------------------------------------------------------------------------------------------------
# The server: uvicorn without its signals, and with bounds on connections and headers.


class _DoorServer(uvicorn.Server):
    """A server whose process handles signals by itself."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Guarded(H11Protocol):
    """A connection that ends if no request comes in time; where there are `most`, one does."""

    most: ClassVar[int]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.most:
            others = (one for one in self.connections if not one.transport.is_closing())
            place = next((one for one in others if _is_idle(one) and one is not self), self)
            place.transport.abort()
            if place is self:
                return
        self.loop.call_later(HEADERS_S, self._end_if_idle, None)

    def pause_writing(self) -> None:
        """Stop writing to an agent that does not read, and cut it off in the end."""
        super().pause_writing()
        self._cut_if_stuck(None)

    def resume_writing(self) -> None:
        self.cutting.cancel()
        super().resume_writing()

    def _cut_if_stuck(self, last: int | None) -> None:
        """End the connection if nothing of what waits has been read since the last look."""
        left = self.transport.get_write_buffer_size()
        if left == last:
            self.transport.abort()
        else:
            self.cutting = self.loop.call_later(SEND_S, self._cut_if_stuck, left)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP; a request whose body it is in gets no other answer."""
        if self.conn.our_state not in {h11.IDLE, h11.SEND_RESPONSE}:
            self.transport.close()  # an answer is under way, or was sent
            return
        super().send_400_response(msg)
        if not _is_idle(self):
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def _end_if_idle(self, last: object) -> None:
        """End the connection if no request has begun since the last look, nor is under way."""
        if self.transport.is_closing():
            return
        if _is_idle(self) and self.cycle is last:
            self.transport.close()
            return
        seen = self.cycle if _is_idle(self) else self
        self.loop.call_later(HEADERS_S, self._end_if_idle, seen)


def _is_idle(connection: Any) -> bool:
    """Whether a connection has no request under way."""
    return not connection.cycle or connection.cycle.response_complete
