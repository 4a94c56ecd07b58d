"""Audit of joins, refusals and revocations: counted, logged, and kept in a bounded file.

`<run>/logs/audit.jsonl` has a line for each event. Refusals of one kind and one peer are written
once in `QUIET_S` with their number, so a peer that floods the broker fills neither disk nor log,
and cannot push older lines out of the file. Writing never fails a request: a disk that is full is
reported, and the counts go on.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import structlog

MAX_FILE_BYTES = 4 * 2**20  # about 20 000 events; with the file before it, at most twice that
QUIET_S = 10.0
MAX_EVENTS = 500  # other events written in that time: enough for a fleet that joins
MAX_BURSTS = 1024  # peers and addresses whose refusals are counted apart
ROUTINE = frozenset({"store", "hello"})
"""Codes of refusals that belong to every restart, and are only counted."""

log = structlog.get_logger()


@dataclass(slots=True)
class _Burst:
    """Refusals of one kind and one peer since they were last written down."""

    written_at: float
    unwritten: int = 0


class Audit:
    """Records events; may be called from any thread. No method raises.

    Args:
        file: File of events; None = logs and counts alone.
        clock: Returns monotonic seconds.
    """

    def __init__(self, file: Path | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._file = file
        self._clock = clock
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._bursts: dict[tuple[str, str], _Burst] = {}
        self._is_failing = False
        self._events, self._window_began_at = 0, clock()

    @property
    def refusals(self) -> dict[str, int]:
        """Refusals by code since the start."""
        with self._lock:
            return dict(self._counts)

    def record(self, event: str, **fields: object) -> None:
        """Record an event that is no refusal: a join, a revocation.

        Beyond `MAX_EVENTS` in `QUIET_S` events are only counted, and `flush` writes their number.
        """
        with self._lock:
            self._events += 1
            if self._events <= MAX_EVENTS:
                self._write(event, fields)

    def record_refusal(self, code: str, peer: str, text: str = "") -> None:
        """Count a refusal, and record it unless this peer has just had the same.

        A refusal of a code in `ROUTINE` is only counted.
        """
        with self._lock:
            self._counts[code] += 1
            if code in ROUTINE:
                return
            now, kind = self._clock(), (code, peer)
            burst = self._bursts.get(kind)
            if burst is None:
                if len(self._bursts) >= MAX_BURSTS:
                    self._write_bursts(now, everything=True)
                self._bursts[kind] = _Burst(now)
                self._write("refused", {"code": code, "peer": peer, "text": text[:200]})
            else:
                burst.unwritten += 1

    def flush(self) -> None:
        """Write the numbers of events that were only counted; to be called every few seconds."""
        with self._lock:
            now = self._clock()
            self._write_bursts(now)
            if now - self._window_began_at >= QUIET_S:
                if self._events > MAX_EVENTS:
                    self._write("more events", {"more": self._events - MAX_EVENTS})
                self._events, self._window_began_at = 0, now

    def _write_bursts(self, now: float, *, everything: bool = False) -> None:
        for (code, peer), burst in list(self._bursts.items()):
            if not everything and now - burst.written_at < QUIET_S:
                continue
            if burst.unwritten:
                self._write("refused", {"code": code, "peer": peer, "more": burst.unwritten})
                burst.written_at, burst.unwritten = now, 0
            if everything or now - burst.written_at >= QUIET_S:
                del self._bursts[code, peer]

    def _write(self, event: str, fields: dict[str, object]) -> None:
        level = log.warning if event in {"refused", "revoked"} else log.info
        level(event, **fields)
        if self._file is None:
            return
        line = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event}
        try:
            self._append(json.dumps(line | fields) + "\n")
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                log.warning("the audit file cannot be written", reason=str(error))
            self._is_failing = True

    def _append(self, line: str) -> None:
        assert self._file is not None
        self._file.parent.mkdir(parents=True, exist_ok=True)
        if self._file.exists() and self._file.stat().st_size + len(line) > MAX_FILE_BYTES:
            self._file.replace(self._file.with_name(f"{self._file.name}.1"))
        # Opened for each line: another broker of this run may have moved the file meanwhile.
        with self._file.open("a", encoding="utf-8") as file:
            file.write(line)
