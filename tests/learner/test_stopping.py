"""A learner that is told to stop leaves in time, whatever becomes of its state."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from queue import Queue

import pytest

from configs.errors import DeadlineError
from learner.assembly import LEAVE_S, leave_limit_s
from learner.stopping import BatchHold, LeftBatch, read_left_batch, write_left_batch

FOR_EVER_S, AT_ONCE_S = 3600.0, 0.01
PATIENCE_S = 30.0


def _told_to_stop(
    save: Callable[[float], object] | None,
    *,
    grace_s: float,
    on_unsaved: Callable[[], object] = lambda: None,
) -> tuple[BatchHold, Exception | None]:
    """Stop in a batch whose state is held, or in one where none is; return why the process ends."""
    stopping, ends = threading.Event(), Queue[Exception | None]()
    hold = BatchHold(stopping, ends.put, grace_s=grace_s, on_unsaved=on_unsaved)
    if save is not None:
        hold.hold_state(save, is_copied=False)
    stopping.set()
    return hold, ends.get(timeout=PATIENCE_S)


def test_what_is_held_is_saved_and_the_process_ends() -> None:
    saved = threading.Event()

    hold, error = _told_to_stop(lambda _: saved.set(), grace_s=FOR_EVER_S)

    assert error is None
    assert saved.is_set()
    with pytest.raises(LeftBatch):
        hold.before_step()


def test_a_save_that_fails_ends_the_process_with_its_error_at_once() -> None:
    def fail(_: float) -> None:
        raise OSError("No space left on device")

    _, error = _told_to_stop(fail, grace_s=FOR_EVER_S)

    assert isinstance(error, OSError)


@pytest.mark.parametrize("is_held", [True, False])
def test_a_process_ends_by_itself_before_it_is_killed(is_held: bool) -> None:
    """Be it that the disk hangs, or that a batch of several ranks goes on."""
    never = threading.Event()

    _, error = _told_to_stop(never.wait if is_held else None, grace_s=AT_ONCE_S)

    assert error is None


def _refuse(_: float) -> None:
    raise DeadlineError("a checkpoint of 4.0 GB must be written within 8 s")


def _fail(_: float) -> None:
    raise OSError("No space left on device")


@pytest.mark.parametrize(
    ("save", "grace_s", "is_noted"),
    [
        (_refuse, FOR_EVER_S, True),
        (threading.Event().wait, 1.0, True),
        (None, 1.0, True),
        (lambda _: None, FOR_EVER_S, False),
        (_fail, FOR_EVER_S, False),
    ],
)
def test_a_batch_that_is_left_without_its_state_is_noted_before_the_process_ends(
    save: Callable[[float], object] | None, grace_s: float, is_noted: bool, tmp_path: Path
) -> None:
    _told_to_stop(save, grace_s=grace_s, on_unsaved=lambda: write_left_batch(tmp_path, 7))

    assert read_left_batch(tmp_path) == (7 if is_noted else None)


@pytest.mark.parametrize("fails", [True, False])
def test_a_batch_that_cannot_be_noted_keeps_no_process(fails: bool) -> None:
    never = threading.Event()

    def note() -> None:
        if fails:
            raise OSError("No space left on device")
        never.wait()

    _, error = _told_to_stop(None, grace_s=AT_ONCE_S, on_unsaved=note)

    assert error is None


@pytest.mark.parametrize(("grace_s", "limit_s"), [(30.0, 3.0), (5.0, 0.5), (600.0, LEAVE_S)])
def test_what_is_closed_as_a_process_leaves_takes_no_more_than_a_tenth_of_its_grace(
    grace_s: float, limit_s: float
) -> None:
    assert leave_limit_s(grace_s) == limit_s


def test_a_state_that_takes_too_long_to_write_is_left() -> None:
    def refuse(_: float) -> None:
        raise DeadlineError("a checkpoint of 4.0 GB must be written within 8 s")

    _, error = _told_to_stop(refuse, grace_s=FOR_EVER_S)

    assert error is None


def test_a_state_that_has_changed_is_not_saved() -> None:
    saved = threading.Event()
    stopping, ends = threading.Event(), Queue[Exception | None]()
    hold = BatchHold(stopping, ends.put, grace_s=AT_ONCE_S)
    hold.hold_state(lambda _: saved.set(), is_copied=False)

    hold.before_step()
    stopping.set()

    assert ends.get(timeout=PATIENCE_S) is None
    assert not saved.is_set()


def test_a_copy_is_saved_after_an_optimizer_step_and_no_longer_after_the_batch() -> None:
    for is_over, grace_s in ((False, FOR_EVER_S), (True, AT_ONCE_S)):
        saved = threading.Event()
        stopping, ends = threading.Event(), Queue[Exception | None]()
        hold = BatchHold(stopping, ends.put, grace_s=grace_s)

        def save(_: object, saved: threading.Event = saved) -> None:
            saved.set()

        hold.hold_state(save, is_copied=True)

        hold.before_step()
        if is_over:
            hold.release_state()
        stopping.set()

        assert ends.get(timeout=PATIENCE_S) is None
        assert saved.is_set() is not is_over
