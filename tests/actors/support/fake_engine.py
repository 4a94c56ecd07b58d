"""An engine without a model, and the tokens it speaks.

The next token and its log-prob are a pure function of the context, so that an episode that is
continued must equal one that was never interrupted: that is all the episode loop can get wrong, and
no model is needed to see it.
"""

from __future__ import annotations

import asyncio
import math
import zlib
from collections.abc import Callable, Sequence

import numpy as np

from actors.chat import Prompt, text_of
from actors.engine.engine import Delta, GenerationRequest, StagedWeights
from buffer.record.episode import PolicyVersion, VersionSpan

STOP = 0
ALPHABET = "\0abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 []()+-*=;:?,.<>_#"


class CharacterTokenizer:
    """One token a character; token 0 ends a turn."""

    stop_token_ids = (STOP,)

    def encode_prompt(self, prompt: Prompt, tools: str = "") -> tuple[int, ...]:
        return self.encode_observation(text_of(prompt))

    def encode_observation(self, text: Prompt, *, is_open: bool = False) -> tuple[int, ...]:
        return tuple(ALPHABET.index(character) for character in text_of(text))

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(ALPHABET[token] for token in token_ids)


def logprob_of(context: tuple[int, ...]) -> float:
    return float(np.float32(-(zlib.crc32(repr(context).encode()) % 1000) / 1000))


Policy = Callable[[tuple[int, ...]], int]
"""The next token after a context."""


def scripted(turns: dict[str, str]) -> Policy:
    """A policy that writes, after a key, what stands there, and then the stop token."""
    tokenizer = CharacterTokenizer()

    def policy(context: tuple[int, ...]) -> int:
        text = tokenizer.decode(context)
        for after, says in turns.items():
            start = text.rfind(after)
            said = text[start + len(after) :]
            if start >= 0 and says.startswith(said):
                return ALPHABET.index(says[len(said)]) if len(said) < len(says) else STOP
        raise AssertionError(f"no script for {text!r}")

    return policy


def sample(
    policy: Policy, request: GenerationRequest, version: PolicyVersion, num_tokens: int = 10**9
) -> Delta:
    """All tokens of a request at once, or its first `num_tokens` as an unfinished delta."""
    context = request.token_ids
    logprobs: list[float] = []
    reason: str | None = None
    while reason is None and len(logprobs) < num_tokens:
        token = policy(context)
        context += (token,)
        logprobs.append(logprob_of(context))
        by_string = request.stop_strings is not None and request.stop_strings.find_end(
            request.turn + context[len(request.token_ids) :]
        )
        if token in request.stop_token_ids or by_string:
            reason = "stop"
        elif len(logprobs) == request.max_tokens:
            reason = "length"
    tokens = context[len(request.token_ids) :]
    return Delta(request.request_id, tokens, tuple(logprobs), (VersionSpan(version, 0),), reason)


class FakeEngine:
    """Serves `tokens_per_step` tokens of every running request while `flowing` is set."""

    def __init__(self, policy: Policy, *, tokens_per_step: int = 10**9) -> None:
        self.policy = policy
        self.tokens_per_step = tokens_per_step
        self.version = PolicyVersion(0, 0)
        self.submitted: list[GenerationRequest] = []
        self.aborted: list[str] = []
        self.applied: list[PolicyVersion] = []
        self.kept_back = 0
        """Tokens of each request that are made and not handed over."""
        self.started = False
        self.closed = False
        self.flowing = asyncio.Event()
        self.flowing.set()
        self._running: dict[str, GenerationRequest] = {}
        self._work = asyncio.Event()

    async def start(self) -> None:
        self.started = True

    def submit(self, requests: list[GenerationRequest]) -> None:
        assert self.started
        self.submitted += requests
        self._running |= {request.request_id: request for request in requests}
        self._work.set()

    def abort(self, request_ids: list[str]) -> None:
        self.aborted += request_ids
        for request_id in request_ids:
            self._running.pop(request_id, None)

    async def halt(self) -> list[Delta]:
        """Return `kept_back` more tokens of each running request as its last."""
        self.tokens_per_step = self.kept_back
        running = list(self._running.values()) if self.kept_back else []
        deltas = [self._advance(request) for request in running]
        self._running.clear()
        return deltas

    async def deltas(self) -> list[Delta]:
        while not self._running:
            self._work.clear()
            await self._work.wait()
        await self.flowing.wait()
        await asyncio.sleep(0.001)
        return [self._advance(request) for request in list(self._running.values())]

    async def apply(self, staged: StagedWeights) -> float:
        self.version = staged.manifest.version
        self.applied.append(self.version)
        return 0.0

    async def probe(self, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        return tuple(math.nan for _ in token_ids[1:])

    async def read_back(self, staged: StagedWeights) -> list[str] | None:
        return None

    async def close(self) -> None:
        self.closed = True

    def _advance(self, request: GenerationRequest) -> Delta:
        delta = sample(self.policy, request, self.version, self.tokens_per_step)
        del self._running[request.request_id]
        if delta.finish_reason is None:
            self._running[request.request_id] = GenerationRequest(
                request.request_id,
                request.token_ids + delta.token_ids,
                request.max_tokens - len(delta.token_ids),
                request.temperature,
                request.stop_token_ids,
            )
        return delta


def hang_after(engine: FakeEngine, steps: int) -> None:
    """Let the engine stop, as a process does that is about to be killed."""
    deltas, left = engine.deltas, iter(range(steps))

    async def until_then() -> list[Delta]:
        if next(left, None) is None:
            await asyncio.Event().wait()
        return await deltas()

    engine.deltas = until_then  # type: ignore[method-assign]
