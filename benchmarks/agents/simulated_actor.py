"""An actor whose engine makes tokens at a fixed rate; all around the engine is real.

    python -m benchmarks.agents.simulated_actor run/config.yaml STEP_S

A step makes one token for each place, of `SLOTS` at most; other requests wait for a place. Turns
have 32 to 96 tokens. With STEP_S 0 a turn of 16 is there at once. A finished turn is handed over at
once, the tokens of a running one every quarter of a second, as by the engines of Nyala.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import random
import signal
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import uvloop
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from actors.assembly import greeting, prepare
from actors.engine.engine import Delta, GenerationRequest, StagedWeights
from actors.episodes.held_leases import SwapGate
from actors.loop import ActorLoop
from benchmarks.agents.clients import TOKENS, WORDS
from broker.client import client_of
from broker.protocol.messages import Publication
from broker.transport.keys import load_pair
from buffer.record.episode import PolicyVersion, VersionSpan
from configs.loader import load
from configs.logging import configure_logging
from configs.settings import Settings

SLOTS = 64
HAND_OVER_S = 0.25
TURN_TOKENS = 32, 96
INSTANT_TOKENS = 16
VOCABULARY = 8192
END = "<|im_end|>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_tokenizer(folder: Path) -> None:
    """Train a tokenizer of pieces of words, as of a chat model, on the words of the agents."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", END]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(token, special=True) for token in special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 4, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        additional_special_tokens=special,
        chat_template=TEMPLATE,
    )
    fast.save_pretrained(str(folder))


@dataclass(slots=True)
class SimulatedTurn:
    """A request that has a place."""

    request: GenerationRequest
    began: float
    tokens: int
    made: int = 0


class SimulatedEngine:
    """Makes random tokens, one for each place in a step.

    Args:
        step_s: Time of a step; 0 = none.
    """

    def __init__(self, step_s: float) -> None:
        self.version = PolicyVersion(0, 0)
        self._step_s = step_s
        self._waiting: deque[GenerationRequest] = deque()
        self._running: dict[str, SimulatedTurn] = {}
        self._ends: list[tuple[float, str]] = []
        self._changed = asyncio.Event()
        self._handed_over_at = 0.0
        self._chance = random.Random(0)

    async def start(self) -> None:
        """Load nothing."""

    def submit(self, requests: list[GenerationRequest]) -> None:
        """Give places to requests, or let them wait for one."""
        self._waiting += requests
        self._fill()
        self._changed.set()

    def abort(self, request_ids: list[str]) -> None:
        """Take requests out."""
        for request_id in request_ids:
            self._running.pop(request_id, None)
        kept = (request for request in self._waiting if request.request_id not in request_ids)
        self._waiting = deque(kept)
        self._fill()

    async def halt(self) -> list[Delta]:
        """Take all requests out."""
        self.abort([*self._running, *(request.request_id for request in self._waiting)])
        return []

    async def deltas(self) -> list[Delta]:
        """Wait for the next end of a turn, or until running ones are handed over."""
        while True:
            now = time.monotonic()
            ended = self._pop_ended(now)
            is_due = now >= self._handed_over_at + HAND_OVER_S
            if ended or (is_due and self._running and self._step_s):
                return ended + (self._of_running(now) if is_due else [])
            until = self._handed_over_at + HAND_OVER_S if self._running else math.inf
            until = min(until, self._ends[0][0] if self._ends else math.inf)
            self._changed.clear()
            try:
                async with asyncio.timeout(None if until == math.inf else max(0.0, until - now)):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def apply(self, staged: StagedWeights) -> float:
        """Take no weights."""
        raise NotImplementedError

    async def probe(self, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        """Return no log-probs."""
        return tuple(math.nan for _ in token_ids[1:])

    async def read_back(self, staged: StagedWeights) -> list[str] | None:  # noqa: ARG002 - none
        """Read nothing back."""
        return None

    async def close(self) -> None:
        """Release nothing."""

    def _fill(self) -> None:
        while self._waiting and len(self._running) < SLOTS:
            request = self._waiting.popleft()
            wanted = self._chance.randint(*TURN_TOKENS) if self._step_s else INSTANT_TOKENS
            tokens = max(1, min(wanted, request.max_tokens))
            turn = SimulatedTurn(request, time.monotonic(), tokens)
            self._running[request.request_id] = turn
            heapq.heappush(self._ends, (turn.began + tokens * self._step_s, request.request_id))

    def _pop_ended(self, now: float) -> list[Delta]:
        ended = []
        while self._ends and self._ends[0][0] <= now:
            turn = self._running.pop(heapq.heappop(self._ends)[1], None)
            if turn is not None:
                ended.append(self._delta(turn, turn.tokens))
        self._fill()
        return ended

    def _of_running(self, now: float) -> list[Delta]:
        self._handed_over_at = now
        deltas = []
        for turn in self._running.values():
            count = min(turn.tokens - 1, int((now - turn.began) / self._step_s))
            if count > turn.made:
                deltas.append(self._delta(turn, count))
        return deltas

    def _delta(self, turn: SimulatedTurn, count: int) -> Delta:
        """Return the tokens of a turn up to a number, the last of which ends it."""
        new, is_last = count - turn.made, count == turn.tokens
        turn.made = count
        tokens = self._chance.choices(TOKENS, k=new)
        if is_last:
            tokens[-1] = turn.request.stop_token_ids[0]
        versions, finish = (VersionSpan(self.version, 0),), "stop" if is_last else None
        return Delta(turn.request.request_id, tuple(tokens), (-1.0,) * new, versions, finish)


class SimulatedWeights:
    """Weights that are there and do not change."""

    is_dirty = False
    figures: Mapping[str, float] = MappingProxyType({})

    def __init__(self, engine: SimulatedEngine) -> None:
        self._engine = engine

    def offer(self, publication: Publication | None) -> None:
        """Follow no publisher."""

    async def first_sync(self, publication: Publication) -> PolicyVersion:
        """Have this version."""
        self._engine.version = publication.version
        return publication.version

    async def newer_than(self, version: PolicyVersion) -> None:  # noqa: ARG002 - there is none
        """Wait for ever."""
        await asyncio.Event().wait()

    async def run(self) -> None:
        """Receive nothing."""
        await asyncio.Event().wait()


async def act(settings: Settings, step_s: float) -> None:
    """Run the actor until a signal."""
    name = "actor-0"
    engine = SimulatedEngine(step_s)
    client = client_of(settings, load_pair(settings.run.folder / "keys", name), name)
    loop = ActorLoop(
        greeting(settings, name),
        run=settings.run,
        actors=settings.actors,
        max_message_bytes=settings.broker.max_message_bytes,
        broker=client,
        engine=engine,
        weights=SimulatedWeights(engine),
        gate=SwapGate(hold_s=0.0),
        prepare=lambda: prepare(settings, name),
    )
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, loop.stop)
    try:
        await loop.run()
    finally:
        await client.close()


def main() -> None:
    """Act for a run."""
    config, step_s = sys.argv[1:]
    settings = load(Path(config))
    configure_logging("actor", run=settings.run.name)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(act(settings, float(step_s)))


if __name__ == "__main__":
    main()
