"""Pulling bytes over ZeroMQ, slice by slice: all of a version, or a sparse update to it.

Consumes CHUNK, LATER, GONE and MOVED; waits for the next slice. What is not answered is asked again
with growing patience; of the publisher, which answers in order, the last slice alone, because many
who repeat all that they wait for would bury a network card that is merely slow.

Asks one source after the other: one that is silent, lies or has nothing makes way for the next,
which goes on at the slices that are missing. All slices but the publisher's are checked by their
digests; the digest of the whole is the caller's.
"""

from __future__ import annotations

import asyncio
import mmap
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from broker.protocol.manifest import DIGEST_BYTES, chunk_digests
from broker.protocol.weight_messages import (
    CHUNK_BYTES,
    PULL_CREDIT,
    Chunk,
    Gone,
    Later,
    Moved,
    Pull,
)
from buffer.record.episode import PolicyVersion
from configs.errors import DeadlineError

from .sources import Answer, Kind, Post, Source

FIRST_PATIENCE_S = 1.0
"""Loopback and a rack answer in milliseconds; a lost request costs this much."""
SILENT_S = 3 * FIRST_PATIENCE_S
"""Two rounds without a word (the second has twice the patience): this peer is gone."""
LATER_S = 10.0
"""A peer that only ever promises has no source itself: one nearer to the publisher is asked."""


@dataclass(frozen=True, slots=True)
class _Failed:
    """Why a source is left."""

    reason: str
    is_fault: bool = True
    has_lied: bool = False


class WeightPull:
    """One pull.

    Args:
        version: What to pull.
        memory: Where to put it; as long as it is.
        sources: Whom to ask, in order.
        base: Where the sparse update begins; None = pull all bytes of the version.
        digests: Of the slices; what is not the publisher's is of no use without.
        failed: Is told which source was left, why, and whether it lied.
        arrived: Is told the offset of each slice that is in its place.
        progress_timeout_s: Time without any new slice after which the last source is left too.
    """

    def __init__(
        self,
        version: PolicyVersion,
        memory: mmap.mmap | bytearray,
        *,
        sources: Sequence[Source],
        base: PolicyVersion | None = None,
        digests: bytes = b"",
        failed: Callable[[Source, str, bool], None] = lambda _source, _reason, _has_lied: None,
        arrived: Callable[[int], None] = lambda _offset: None,
        progress_timeout_s: float,
    ) -> None:
        self._version = version
        self._base = base
        self._num_bytes = len(memory)
        self._memory = memory
        self._sources = sources
        self._digests = digests
        self._failed = failed
        self._arrived = arrived
        self._progress_timeout_s = progress_timeout_s
        self._inbox: asyncio.Queue[Answer] = asyncio.Queue()
        self._todo = deque(range(0, len(memory), CHUNK_BYTES))
        self._asked: dict[int, None] = {}  # in the order of asking
        self.num_bytes = Counter[Kind]()
        """Received, by the kind of source."""

    def take(self, answer: Answer) -> None:
        """Take an answer of a source."""
        self._inbox.put_nowait(answer)

    async def run(self) -> Moved | None:
        """Pull everything. Returns None when complete, or what there is instead.

        Raises:
            DeadlineError: no source has brought anything for `progress_timeout_s`.
        """
        for source in self._sources:
            self._inbox = asyncio.Queue()  # what the one before has sent is not this one's
            async with source.open(self.take) as post:
                end = await self._pull_from(source, post)
            if not isinstance(end, _Failed):
                return end
            if end.is_fault:
                self._failed(source, end.reason, end.has_lied)
            self._ask_again(list(self._asked))
        raise DeadlineError(
            f"a pull of weights must make progress within {self._progress_timeout_s:g} s, got "
            f"nothing of {tuple(self._version)}; the next news start another"
        )

    async def _pull_from(self, source: Source, post: Post) -> Moved | _Failed | None:
        """Ask one source for all that is missing."""
        patience_s, silent_s, has_promised = FIRST_PATIENCE_S, 0.0, False
        while self._todo or self._asked:
            self._ask(post)
            bound_s = self._silence_s(source, has_promised=has_promised)
            pause_s = min(patience_s, bound_s - silent_s)
            try:
                async with asyncio.timeout(pause_s):
                    answer = await self._inbox.get()
            except TimeoutError:
                silent_s += pause_s
                if silent_s >= bound_s:
                    return _Failed(f"it has brought nothing for {silent_s:.1f} s")
                patience_s *= 2  # for as long as it is asked: the link is slow, or it is away
                self._ask_again(list(self._asked)[-1 if source.kind == "publisher" else 0 :])
                continue
            match answer:
                case Moved():
                    if self._base is not None or answer.manifest.version > self._version:
                        return answer
                case Later():
                    has_promised = True
                case Gone(version=self._version):
                    return _Failed("it has another version", is_fault=False)
                case Chunk() if self._is_missing(answer):
                    if not await self._keep(answer, source.kind):
                        return _Failed("what it sent has a wrong digest", has_lied=True)
                    silent_s = 0.0
                case _:  # a repetition, or an answer to another pull
                    pass
        return None

    def _silence_s(self, source: Source, *, has_promised: bool) -> float:
        if source is self._sources[-1]:
            return self._progress_timeout_s
        return LATER_S if has_promised else SILENT_S

    def _ask(self, post: Post) -> None:
        while self._todo and len(self._asked) < PULL_CREDIT:
            offset = self._todo.popleft()
            self._asked[offset] = None
            post(Pull(self._version, offset, self._length(offset), self._base))

    def _ask_again(self, offsets: list[int]) -> None:
        self._todo.extendleft(reversed(offsets))
        for offset in offsets:
            del self._asked[offset]

    def _is_missing(self, chunk: Chunk) -> bool:
        """Whether it is what was asked for, and no repetition."""
        is_ours = (chunk.version, chunk.base) == (self._version, self._base)
        is_asked = chunk.offset in self._asked
        return is_ours and is_asked and len(chunk.payload) == self._length(chunk.offset)

    async def _keep(self, chunk: Chunk, kind: Kind) -> bool:
        """Put a slice into its place. False: it is not what it should be."""
        if kind == "publisher":
            asked = list(self._asked)
            self._ask_again(asked[: asked.index(chunk.offset)])  # lost: it answers in order
        elif not await self._is_right(chunk):
            return False
        self._memory[chunk.offset : chunk.offset + len(chunk.payload)] = chunk.payload
        del self._asked[chunk.offset]
        self.num_bytes[kind] += len(chunk.payload)
        self._arrived(chunk.offset)
        return True

    async def _is_right(self, chunk: Chunk) -> bool:
        begin = chunk.offset // CHUNK_BYTES * DIGEST_BYTES
        right = self._digests[begin : begin + DIGEST_BYTES]
        return await asyncio.to_thread(chunk_digests, chunk.payload, CHUNK_BYTES) == right

    def _length(self, offset: int) -> int:
        return min(CHUNK_BYTES, self._num_bytes - offset)
