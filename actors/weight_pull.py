"""Pulling bytes over ZeroMQ, slice by slice: all of a version, or a sparse update to it.

Consumes CHUNK and MOVED; waits for the next slice; unanswered requests are repeated with growing
patience, so that a slow link is not buried under repetitions. Checks places, not contents: the
digest of the whole is the caller's.
"""

from __future__ import annotations

import asyncio
import mmap
from collections import deque
from collections.abc import Callable

from broker.weights import CHUNK_BYTES, PULL_CREDIT, Chunk, Moved, Pull
from buffer.episode import PolicyVersion
from configs.errors import DeadlineError

FIRST_PATIENCE_S = 1.0
"""Loopback and a rack answer in milliseconds; a lost request costs this much."""


class WeightPull:
    """One pull.

    Args:
        version: What to pull.
        memory: Where to put it; as long as it is.
        base: Where the sparse update begins; None = pull all bytes of the version.
        post: Sends a message to the publisher; may lose it.
        progress_timeout_s: Time without any new slice after which the pull ends.
    """

    def __init__(
        self,
        version: PolicyVersion,
        memory: mmap.mmap | bytearray,
        *,
        base: PolicyVersion | None = None,
        post: Callable[[object], bool],
        progress_timeout_s: float,
    ) -> None:
        self._version = version
        self._base = base
        self._num_bytes = len(memory)
        self._memory = memory
        self._post = post
        self._progress_timeout_s = progress_timeout_s
        self._inbox: asyncio.Queue[Chunk | Moved] = asyncio.Queue()
        self._todo = deque(range(0, len(memory), CHUNK_BYTES))
        self._asked: set[int] = set()

    def take(self, answer: Chunk | Moved) -> None:
        """Take an answer of the publisher."""
        self._inbox.put_nowait(answer)

    async def run(self) -> Moved | None:
        """Pull everything. Returns None when complete, or what there is instead.

        Raises:
            DeadlineError: nothing has come for `progress_timeout_s`.
        """
        patience_s, silent_s = FIRST_PATIENCE_S, 0.0
        while self._todo or self._asked:
            self._ask()
            try:
                async with asyncio.timeout(patience_s):
                    answer = await self._inbox.get()
            except TimeoutError:
                silent_s += patience_s
                if silent_s >= self._progress_timeout_s:
                    raise DeadlineError(
                        f"a pull of weights must make progress within {self._progress_timeout_s:g} "
                        f"s, got nothing of {tuple(self._version)}; the next news start another"
                    ) from None
                patience_s *= (
                    2  # for the rest of this pull: the link is slow, or the publisher away
                )
                self._todo.extendleft(self._asked)
                self._asked.clear()
                continue
            if isinstance(answer, Moved):
                if self._base is not None or answer.manifest.version > self._version:
                    return answer
            elif self._store(answer):
                silent_s = 0.0
        return None

    def _ask(self) -> None:
        while self._todo and len(self._asked) < PULL_CREDIT:
            offset = self._todo.popleft()
            self._asked.add(offset)
            self._post(Pull(self._version, offset, self._length(offset), self._base))

    def _store(self, chunk: Chunk) -> bool:
        """Write a slice to its place, unless it is a repetition or not what was asked for."""
        offset, payload = chunk.offset, chunk.payload
        is_ours = (chunk.version, chunk.base) == (self._version, self._base)
        if not is_ours or offset not in self._asked or len(payload) != self._length(offset):
            return False
        self._memory[offset : offset + len(payload)] = payload
        self._asked.discard(offset)
        return True

    def _length(self, offset: int) -> int:
        return min(CHUNK_BYTES, self._num_bytes - offset)
