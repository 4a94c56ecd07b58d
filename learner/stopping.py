"""Stop in the middle of a batch: the state before it is saved at once, and the learner leaves.

The loop holds and releases the state; a thread waits for the request to stop.

    begin (a batch) ──▶ held ──before_step──▶ let go: the batch is finished, then the learner stops
                          │ told to stop
                          └──▶ saved by a thread ──▶ left: the batch stays sealed, and is replayed

Parameters and moments change in optimizer steps alone, so until the first of a batch they are what
they were after the batch before, while a microbatch may be in the middle of its passes. A thread
writes them from where they lie, and ends the process without waiting for the microbatch, whose
passes hold the main thread for as long as they take. Where a batch has several optimizer steps, a
copy is held, until the last of them.

Ranks of one machine, which are told together, write it together: they are in the same batch, as
none passes its optimizer step without the others, and their threads talk over a process group of
their own. With several machines, of which one alone may be told, the batch is finished.

Whoever told the learner to stop kills it after `console.stop_timeout_s`. What is not on the disk
somewhat before is not written any more, whatever the loop is doing: the learner leaves, and the
last whole checkpoint counts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import structlog

from configs import durable
from configs.errors import DeadlineError
from configs.worker import Worker

log = structlog.get_logger()

LEFT_BATCH_FILE = "left_batch.json"
LOOK_EVERY_S = 1.0
"""How soon the thread sees that the loop has ended; it sees a stop or a batch at once."""
SHARE_TO_SAVE = 0.75
"""Share of `console.stop_timeout_s` for what is written; the rest is for the process to end."""
SHARE_TO_END = 0.1
"""Share for noting the batch that is left, and once more for what a process closes as it leaves.
The rest is spare."""

Save = Callable[[float], object]
"""Makes the state durable before a given time of the monotonic clock."""
Leave = Callable[[Exception | None], None]
"""Ends the process: after a request to stop (None), or because of an error."""


class LeftBatch(Exception):
    """The batch under way is left, and the loop must end without it.

    The state before the batch is saved if there was time.
    """


class BatchHold:
    """Holds the state before a batch for a stop, and starts the thread that waits for one.

    Args:
        stopping: Set when the learner is asked to stop.
        leave: Ends the process; None = the main thread ends at its next call of a method here.
        grace_s: Time after which a learner that is asked to stop is killed.
        on_unsaved: Notes the batch that is left without its state; called in another thread.
    """

    def __init__(
        self,
        stopping: threading.Event,
        leave: Leave | None,
        *,
        grace_s: float,
        on_unsaved: Callable[[], object] = lambda: None,
    ) -> None:
        self._stopping, self._leave, self._on_unsaved = stopping, leave, on_unsaved
        self._to_save_s, self._to_note_s = SHARE_TO_SAVE * grace_s, SHARE_TO_END * grace_s
        self._changed = threading.Condition(threading.RLock())
        self._save: Save | None = None
        self._is_copied = self._has_left = self._is_closed = False
        self._worker = Worker(self._wait_for_stop, name="stop").start()

    def hold_state(self, save: Save, *, is_copied: bool) -> None:
        """Hold the present state until the first optimizer step of the batch.

        Args:
            save: Saves the state; called in another thread.
            is_copied: Whether `save` saves a copy, which outlasts optimizer steps.
        """
        with self._changed:
            self._save, self._is_copied = save, is_copied
            self._changed.notify_all()

    def before_step(self) -> None:
        """Release the state, unless it is a copy: an optimizer step is about to change it.

        Waits for a save under way.

        Raises:
            LeftBatch: A stop has left the batch, whether or not the state could be saved.
            Exception: The error that ended the save.
        """
        self._release(is_copied=self._is_copied)

    def release_state(self) -> None:
        """Release the state: the batch is trained. Waits and raises as `before_step`."""
        self._release(is_copied=False)

    @property
    def has_left(self) -> bool:
        """Whether a stop has left the batch; waits for a save under way."""
        with self._changed:
            return self._has_left

    def close(self) -> None:
        """End the thread that stops the learner."""
        with self._changed:
            self._is_closed = True
            self._save = None
            self._changed.notify_all()

    def _release(self, *, is_copied: bool) -> None:
        """Release the state, unless it is a copy; raises as `before_step` does."""
        with self._changed:  # waits for a save under way
            self._worker.raise_if_failed()
            if self._has_left:
                raise LeftBatch
            if not is_copied:
                self._save = None

    def _wait_for_stop(self) -> None:
        """Wait for the request to stop, save the state that is held, and leave; in a thread."""
        while not self._stopping.wait(LOOK_EVERY_S):
            if self._is_closed:
                return
        deadline = time.monotonic() + self._to_save_s
        error: Exception | None = None
        with self._changed:
            while self._save is None and not self._is_closed and time.monotonic() < deadline:
                self._changed.wait(min(LOOK_EVERY_S, max(0.0, deadline - time.monotonic())))
            if self._is_closed:
                return
            try:
                self._save_by(deadline)
            except DeadlineError as late:
                log.warning(
                    "stopping without a new checkpoint: the last complete one is used",
                    reason=str(late),
                )
                with suppress(Exception):  # a disk that hangs or is full keeps no process
                    Worker(self._on_unsaved, name="stop-note").start().join(self._to_note_s)
            except Exception as why:  # noqa: BLE001 - whatever it is, the process leaves with it
                error = why
            self._has_left = True
            if self._leave is not None:
                self._leave(error)
        if error is not None:
            raise error

    def _save_by(self, deadline: float) -> None:
        """Save the state that is held.

        Raises:
            DeadlineError: The state is not saved in time, or no state is held.
            Exception: The error that ended the save.
        """
        save, result = self._save, "none that could be saved"
        if save is not None:
            result = "an unfinished save"
            saving = Worker(lambda: save(deadline), name="stop-save").start()
            saving.join(max(0.0, deadline - time.monotonic()))
            if not saving.is_alive:
                return
        raise DeadlineError(
            f"a learner that is told to stop must save the state before its batch within "
            f"{self._to_save_s:g} s, got {result}; raise console.stop_timeout_s, of which this is "
            f"{SHARE_TO_SAVE:.0%}"
        )


# --------------------------------------------------------------------------------------------------
# The batch that a stop left, in a file of the run's folder. The next life begins it again, and that
# is no start that counts towards `learner.max_claim_attempts`: nothing was wrong with the batch.


def write_left_batch(run_folder: Path, step: int) -> None:
    """Write down that batch `step` was left, in place of an earlier one."""
    durable.replace_file(run_folder / LEFT_BATCH_FILE, msgspec.json.encode(step))


def read_left_batch(run_folder: Path) -> int | None:
    """Return the batch that the last life left; None if it left none, or the file is damaged."""
    try:
        return msgspec.json.decode((run_folder / LEFT_BATCH_FILE).read_bytes(), type=int)
    except (FileNotFoundError, msgspec.MsgspecError):  # at worst a start is counted
        return None


def take_left_batch(run_folder: Path) -> int | None:
    """Return the batch that the last life left, as `read_left_batch`, and delete the file."""
    step = read_left_batch(run_folder)
    (run_folder / LEFT_BATCH_FILE).unlink(missing_ok=True)
    return step
