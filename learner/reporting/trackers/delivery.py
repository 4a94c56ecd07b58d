"""Delivery of a run to one tracker, in a thread of its own.

    begin -> (figures, tables) as they come -> [model] -> end

Waits for a wake-up, and after an error for a while. A tracker that is away is tried again, later
and later, and gets everything then; what it refuses is left out and counted. Both are logged once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import NamedTuple

import msgspec
import structlog

from configs import durable
from configs.worker import Worker

from .feed import Feed
from .tracker import Parameters, Tracker

# --------------------------------------------------------------------------------------------------
# Bookmarks: the last steps that a tracker has, in a file of the run's folder, for a resume.

FOLDER = "trackers"


class Bookmark(msgspec.Struct):
    """The progress of one tracker: what it has received."""

    run_id: str | None = None
    """The tracker's own id of the run; None = it has none yet."""
    sent: dict[str, int] = {}
    """`batches`, `evaluations`, `samples/train` or `samples/eval` -> last step."""
    has_model: bool = False
    """Whether it has the finished model."""


def read_bookmark(run_folder: Path, name: str) -> Bookmark:
    """Read the progress of the tracker of this name; where it cannot be read, begin anew."""
    try:
        return msgspec.json.decode(_path(run_folder, name).read_bytes(), type=Bookmark)
    except (OSError, msgspec.DecodeError):
        return Bookmark()


def write_bookmark(run_folder: Path, name: str, bookmark: Bookmark) -> None:
    """Write the progress of a tracker."""
    durable.replace_file(_path(run_folder, name), msgspec.json.encode(bookmark))


def _path(run_folder: Path, name: str) -> Path:
    return run_folder / FOLDER / f"{name}.json"


# --------------------------------------------------------------------------------------------------
# Delivery of a run to one tracker, in a thread of its own.

log = structlog.get_logger()

POINTS = 8  # of one call: some thousand figures
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
LAST_PAUSE_S = 0.5  # once the run has ended, and a deadline runs


class _Item(NamedTuple):
    stream: str
    step: int
    send: Callable[[], None]


class Delivery:
    """One tracker, its place in the run, and the thread that serves it.

    Args:
        name: Name of the tracker: its key in `trackers`.
        tracker: The tracker; only the thread calls it.
        folder: Folder of the run.
        parameters: Settings of the run.
        first_pause_s: After a first failure; it doubles up to `LONGEST_PAUSE_S`.
    """

    def __init__(
        self,
        name: str,
        tracker: Tracker,
        folder: Path,
        parameters: Parameters,
        *,
        first_pause_s: float = FIRST_PAUSE_S,
    ) -> None:
        self.name, self._tracker, self._folder = name, tracker, folder
        self._parameters, self._first_pause_s = parameters, first_pause_s
        self._mark = read_bookmark(folder, name)
        self._feed = Feed(folder, self._mark.sent)
        self._random = Random()
        self._awake, self._ended = threading.Event(), threading.Event()
        self._is_finished = self._has_begun = False
        self._items: list[_Item] = []
        self._failures = 0
        self.refused = 0
        """Calls that the tracker does not take."""
        self.has_got_all = False
        """Whether the tracker has got everything, up to the end."""
        self.progressed_at = time.monotonic()
        """When something last got through, by the monotonic clock."""
        self._worker = Worker(self._work, name=name)

    def start(self) -> None:
        """Start the thread that delivers."""
        self._worker.start()

    @property
    def is_under_way(self) -> bool:
        """Whether the thread is still running."""
        return self._worker.is_alive

    @property
    def newest(self) -> int:
        """The last batch that the tracker has; 0 = none."""
        return self._mark.sent.get("batches", 0)

    def wake(self) -> None:
        """Wake the thread to look at the run's files."""
        self._awake.set()

    def request_end(self, *, is_finished: bool) -> None:
        """Tell the thread to deliver what is left, then to end; a finished run's model too."""
        self._is_finished = is_finished
        self._ended.set()
        self._awake.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread, `timeout_s` at most."""
        with suppress(Exception):  # it has logged its error
            self._worker.join(timeout_s)

    def _work(self) -> None:
        while True:
            self._awake.clear()
            is_ended = self._ended.is_set()  # before the files are read for the last time
            if not self._try_all(is_ended=is_ended):
                self._pause()
            elif is_ended:
                return
            else:
                self._awake.wait()

    def _try_all(self, *, is_ended: bool) -> bool:
        """Deliver all that is new; False where the tracker is away, which is logged once."""
        try:
            self._deliver(is_ended=is_ended)
        except OSError as error:
            self._failures += 1
            if self._failures == 1:
                log.warning("a tracker is unreachable", tracker=self.name, reason=first_line(error))
            return False
        if self._failures:
            log.info("a tracker is reachable again", tracker=self.name, tries=self._failures)
        self._failures = 0
        return True

    def _pause(self) -> None:
        if self._ended.is_set():
            time.sleep(LAST_PAUSE_S)
            return
        longest_s = min(LONGEST_PAUSE_S, self._first_pause_s * 2 ** min(self._failures - 1, 10))
        self._ended.wait(longest_s * self._random.uniform(0.5, 1.0))

    def _deliver(self, *, is_ended: bool) -> None:
        """Deliver all that is new to the tracker.

        Raises:
            OSError: The tracker is away; what it has not got stays first in line.
        """
        if not self._has_begun:
            self._mark.run_id = self._tracker.start_run(self._mark.run_id, self._parameters)
            self._has_begun = True
            self._save()
        while self._items or self._collect(is_ended=is_ended):
            item = self._items[0]
            self._send(item.send)
            self._mark.sent[item.stream] = max(item.step, self._mark.sent.get(item.stream, 0))
            self._save()
            self._items.pop(0)
        if is_ended:
            self._close()

    def _collect(self, *, is_ended: bool) -> bool:
        """Read the next entries from the files; False where there are none."""
        stream, points = self._feed.points(POINTS)
        if points:
            self._items.append(_Item(stream, points[-1].step, partial(self._tracker.log, points)))
            return True
        self._items += [
            _Item(table.name, table.step, partial(self._tracker.table, table))
            for table in self._feed.tables(is_ended=is_ended)
        ]
        return bool(self._items)

    def _send(self, call: Callable[[], None]) -> None:
        try:
            call()
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001 - of foreign code; the rest may be well
            self.refused += 1
            if self.refused == 1:
                reason = f"{type(error).__name__}: {first_line(error)}"
                log.warning("a tracker refuses a part", tracker=self.name, reason=reason)
        self._on_progress()

    def _close(self) -> None:
        model = self._folder / "model"
        if self._is_finished and not self._mark.has_model and model.is_dir():
            self._send(lambda: self._tracker.take_model(model, self._on_progress))
            self._mark.has_model = True
            self._save()
        self._send(lambda: self._tracker.end_run(is_finished=self._is_finished))
        self._feed.close()
        self.has_got_all = True

    def _on_progress(self) -> None:
        self.progressed_at = time.monotonic()

    def _save(self) -> None:
        write_bookmark(self._folder, self.name, self._mark)


def first_line(error: BaseException) -> str:
    """Write the first line of an error's text."""
    return (str(error).strip() or type(error).__name__).partition("\n")[0][:300]
