"""A pull over ZeroMQ, slice by slice: all bytes of a version, or one sparse update to it.

Consumes CHUNK, LATER, GONE and MOVED; waits for the next slice. Unanswered requests are repeated at
growing intervals. The publisher, which answers in order, is first asked for a few bytes of the last
slice: any slice that has not come before these bytes was lost. So a link that is merely slow
carries no slice twice.

Sources are asked one after the other. A source that is silent, sends wrong bytes or has nothing is
left for the next one, which goes on at the missing slices. A peer is also left if it is behind and
slower than the publisher (see below), which is asked for one slice as a measure. Where several
sources may have all bytes, slices of all but the publisher are checked by their digests; the caller
checks the digest of the whole.
"""

from __future__ import annotations

import asyncio
import mmap
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

from broker.protocol.manifest import DIGEST_BYTES, chunk_digests
from broker.protocol.weight_messages import (
    CHUNK_BYTES,
    PULL_CREDIT,
    Pull,
    SlicePending,
    VersionGone,
    VersionReplaced,
    WeightChunk,
)
from buffer.record.episode import PolicyVersion
from configs.errors import DeadlineError

from .sources import Answer, Kind, NoAddressError, Post, PullSource

FIRST_WAIT_S = 1.0
"""Loopback and a rack answer in milliseconds; a lost request costs this much."""
SILENT_S = 3 * FIRST_WAIT_S
"""Two rounds without an answer (the second twice as long), after which a peer counts as gone."""
MOST_INQUIRIES = 256
"""Inquiries that are told apart, by their lengths in bytes."""
LATER_S = 10.0
"""Time after which a peer that only answers LATER is left: it has no source itself."""


@dataclass(frozen=True, slots=True)
class _Failed:
    """Reason for leaving a source."""

    reason: str
    is_fault: bool = True
    has_lied: bool = False


class SlicePull:
    """One pull of a version or of a sparse update.

    Args:
        version: Version to pull.
        memory: Destination, of the same length.
        sources: Sources in order of preference.
        base: Version that the sparse update begins at; None = pull all bytes of the version.
        digests: Digests of the slices; None = the caller's check of the whole is enough.
        failed: Called with a source that was left, the reason, and whether it sent wrong bytes.
        arrived: Called with the offset of each slice that is in its place.
        progress_timeout_s: Time without any new slice after which the last source is left too.
    """

    def __init__(
        self,
        version: PolicyVersion,
        memory: mmap.mmap | bytearray,
        *,
        sources: Sequence[PullSource],
        base: PolicyVersion | None = None,
        digests: bytes | None = None,
        failed: Callable[[PullSource, str, bool], None] = lambda _source, _reason, _has_lied: None,
        arrived: Callable[[int], None] = lambda _offset: None,
        progress_timeout_s: float,
    ) -> None:
        self._version = version
        self._base = base
        self.wanted_bytes = len(memory)
        self._memory = memory
        self._sources = sources
        self._digests = digests
        self._failed = failed
        self._arrived = arrived
        self._progress_timeout_s = progress_timeout_s
        self._inbox: asyncio.Queue[tuple[Kind, Answer]] = asyncio.Queue()
        self._publisher: Post | None = None
        """Asks the publisher, if it is the last source; peers are measured by it."""
        self._todo = deque(range(0, len(memory), CHUNK_BYTES))
        self._asked: dict[int, None] = {}  # in the order of asking
        self._inquiries = 0
        self._inquiry: tuple[int, int] | None = None
        """Offset and length of the last inquiry, until lost slices are asked for again."""
        self.num_bytes = Counter[Kind]()
        """Bytes received, by the kind of source."""

    def on_answer(self, answer: Answer) -> None:
        """Process an answer of the publisher, which comes over a link that is always there."""
        self._on_answer_of("publisher", answer)

    def _on_answer_of(self, kind: Kind, answer: Answer) -> None:
        self._inbox.put_nowait((kind, answer))

    async def run(self) -> VersionReplaced | None:
        """Pull all slices. Return None when complete, or the version that the publisher has now.

        Raises:
            DeadlineError: No source has brought anything for `progress_timeout_s`.
        """
        async with AsyncExitStack() as stack:
            for last in self._sources[-1:]:
                if last.kind == "publisher":
                    self._publisher = await stack.enter_async_context(last.open(self.on_answer))
            for source in self._sources:
                self._inbox = asyncio.Queue()  # without late answers of the source before
                try:
                    async with source.open(partial(self._on_answer_of, source.kind)) as post:
                        end = await self._pull_from(source, post)
                except NoAddressError as error:
                    end = _Failed(str(error))
                if not isinstance(end, _Failed):
                    return end
                if end.is_fault:
                    self._failed(source, end.reason, end.has_lied)
                self._ask_again(list(self._asked))
        raise DeadlineError(
            f"a pull of weights must make progress within {self._progress_timeout_s:g} s, got "
            f"nothing more of {tuple(self._version)}; the next announcement starts another"
        )

    async def _pull_from(self, source: PullSource, post: Post) -> VersionReplaced | _Failed | None:
        """Ask one source for all missing slices."""
        clock = asyncio.get_running_loop().time
        wait_s, pace = FIRST_WAIT_S, Pace(clock)
        while self._todo or self._asked:
            bound_s = self._silence_s(source, pace)
            left_s = pace.brought_at + bound_s - clock()
            if left_s <= 0:  # however often it has answered LATER meanwhile
                return _Failed(f"it has brought nothing for {bound_s:.1f} s")
            self._ask(post)
            self._measure(source, pace)
            try:
                async with asyncio.timeout(min(wait_s, left_s)):
                    kind, answer = await self._inbox.get()
            except TimeoutError:
                wait_s *= 2  # with this source: its link is slow, or it is away
                if source.kind == "publisher":
                    self._inquire(post)
                else:
                    self._ask_again(list(self._asked))
                continue
            take = self._take if kind == source.kind else self._compare
            end = await take(answer, source, pace)
            if end is not None:
                return end
        return None

    async def _take(
        self, answer: Answer, source: PullSource, pace: Pace
    ) -> VersionReplaced | _Failed | None:
        """Process an answer of the source; return the end of the pull if the answer ends it."""
        match answer:
            case VersionReplaced():
                if self._base is not None or answer.manifest.version > self._version:
                    return answer
            case SlicePending():
                pace.has_promised = True
            case VersionGone(version=self._version):
                return _Failed("it has another version", is_fault=False)
            case WeightChunk() if self._is_missing(answer):
                if not await self._keep(answer, source.kind):
                    return _Failed("what it sent has a wrong digest", has_lied=True)
                pace.brought()
            case WeightChunk() if self._answers_inquiry(answer):
                asked = list(self._asked)
                self._ask_again(asked[: asked.index(answer.offset) + 1])
            case _:  # a repetition, or an answer to another pull
                pass
        return None

    def _measure(self, source: PullSource, pace: Pace) -> None:
        """Ask the publisher for a slice if a peer is late, to compare both."""
        if pace.measuring_s > self._progress_timeout_s:
            pace.give_up()
        is_measured = self._publisher is not None and source.kind == "peers" and pace.can_measure
        if not (is_measured and self._asked and pace.is_behind) or pace.is_measuring:
            return
        offset = next(iter(self._asked))
        pull = Pull(self._version, offset, self._length(offset), self._base)
        if self._publisher is not None and self._publisher(pull):
            pace.begin_measurement(offset)

    async def _compare(
        self, answer: Answer, _source: PullSource, pace: Pace
    ) -> VersionReplaced | _Failed | None:
        """Compare a peer with the publisher by this answer of the publisher; keep the slice."""
        if not isinstance(answer, WeightChunk):
            if not isinstance(answer, SlicePending) and pace.is_measuring:
                pace.give_up()  # the publisher has another version when a peer still has this one
            return None
        is_of_this = (answer.version, answer.base) == (self._version, self._base)
        if not (is_of_this and pace.is_asked_for(answer.offset)):
            return None
        pace.measure()
        if self._is_missing(answer):
            await self._keep(answer, "publisher")
        return _Failed("it is less than half as fast as the publisher") if pace.is_behind else None

    def _silence_s(self, source: PullSource, pace: Pace) -> float:
        if source is self._sources[-1] or pace.is_measuring:  # both share one link
            return self._progress_timeout_s
        return LATER_S if pace.has_promised else SILENT_S

    def _ask(self, post: Post) -> None:
        while self._todo and len(self._asked) < PULL_CREDIT:
            offset = self._todo.popleft()
            self._asked[offset] = None
            post(Pull(self._version, offset, self._length(offset), self._base))

    def _inquire(self, post: Post) -> None:
        """Ask the publisher for the beginning of the last slice, to see which slices were lost."""
        offset = next(reversed(self._asked))
        self._inquiries = self._inquiries % MOST_INQUIRIES + 1
        self._inquiry = offset, self._inquiries
        post(Pull(self._version, offset, self._inquiries, self._base))

    def _answers_inquiry(self, chunk: WeightChunk) -> bool:
        """Return whether this is the answer to the last inquiry, and its slice has not come."""
        is_ours = (chunk.version, chunk.base) == (self._version, self._base)
        is_last = (chunk.offset, len(chunk.payload)) == self._inquiry
        return is_ours and is_last and chunk.offset in self._asked

    def _ask_again(self, offsets: list[int]) -> None:
        self._inquiry = None
        self._todo.extendleft(reversed(offsets))
        for offset in offsets:
            del self._asked[offset]

    def _is_missing(self, chunk: WeightChunk) -> bool:
        """Return whether this slice was asked for and has not come before."""
        is_ours = (chunk.version, chunk.base) == (self._version, self._base)
        is_asked = chunk.offset in self._asked
        return is_ours and is_asked and len(chunk.payload) == self._length(chunk.offset)

    async def _keep(self, chunk: WeightChunk, kind: Kind) -> bool:
        """Write a slice to its place. False: its digest is wrong."""
        if kind == "publisher":
            asked = list(self._asked)
            self._ask_again(asked[: asked.index(chunk.offset)])  # lost: it answers in order
        elif self._digests is not None and not await self._is_right(chunk, self._digests):
            return False
        self._memory[chunk.offset : chunk.offset + len(chunk.payload)] = chunk.payload
        del self._asked[chunk.offset]
        self.num_bytes[kind] += len(chunk.payload)
        self._arrived(chunk.offset)
        return True

    async def _is_right(self, chunk: WeightChunk, digests: bytes) -> bool:
        begin = chunk.offset // CHUNK_BYTES * DIGEST_BYTES
        right = digests[begin : begin + DIGEST_BYTES]
        return await asyncio.to_thread(chunk_digests, chunk.payload, CHUNK_BYTES) == right

    def _length(self, offset: int) -> int:
        return min(CHUNK_BYTES, self.wanted_bytes - offset)


# --------------------------------------------------------------------------------------------------
# Pace of a source in one pull, where a peer is compared with the publisher.
#
# A peer of a site passes on slices that it gets over a link that may be slow. So no fixed rate
# tells a slow link from a slow peer. Where a peer is behind, the publisher is asked for one of the
# slices: the peer may take twice as long as the publisher for each slice, and `SLACK_S` more for
# all of them. Pure, with an injected clock.

SLACK_S = 10.0
"""Time that a peer may be behind: it lost its source, or was not told of the version yet."""
SLICE_S = 1.0
"""Time for a slice up to which a peer is not compared: 4 MB/s."""
SHARE = 2
"""Factor of the publisher's time for a slice, which is measured while the link is in use."""


class Pace:
    """Counts the slices of a source, and decides whether a peer is too slow.

    Example:
        brought() ... is_behind -> begin_measurement() -> the publisher's answer -> measure()
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began_at = self.brought_at = clock()
        self._slices = 0
        self._slice_s = SLICE_S
        self._asked_at: float | None = None
        self._asked_for = 0
        self.can_measure = True
        """False once the publisher has not answered, or has no such slice."""
        self.has_promised = False

    def brought(self) -> None:
        """Count a slice of the source."""
        self._slices += 1
        self.brought_at = self._clock()

    @property
    def is_behind(self) -> bool:
        """Whether the source has taken longer for its slices than it may."""
        may_take_s = SLACK_S + self._slice_s * self._slices
        return self._clock() - self._began_at > may_take_s

    @property
    def is_measuring(self) -> bool:
        """Whether a slice of the publisher is under way: from `begin_measurement` to `measure`."""
        return self._asked_at is not None

    @property
    def measuring_s(self) -> float:
        """Seconds since the publisher was asked."""
        return 0.0 if self._asked_at is None else self._clock() - self._asked_at

    def is_asked_for(self, offset: int) -> bool:
        """Return whether the publisher is asked for this slice."""
        return self.is_measuring and offset == self._asked_for

    def begin_measurement(self, offset: int) -> None:
        """Note that the publisher is asked for a slice."""
        self._asked_at, self._asked_for = self._clock(), offset

    def measure(self) -> None:
        """Note the publisher's answer, and set the time allowed for a slice."""
        assert self._asked_at is not None
        self._slice_s = max(SLICE_S, SHARE * (self._clock() - self._asked_at))
        self._asked_at = None

    def give_up(self) -> None:
        """Compare no more: the peer's pull goes on without a measure."""
        self._asked_at, self.can_measure = None, False
