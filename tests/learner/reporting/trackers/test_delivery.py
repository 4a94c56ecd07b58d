"""Delivery to a tracker that is away, refuses, or comes back, and across lives of the learner."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from structlog.testing import capture_logs

from learner.reporting.trackers.delivery import Delivery, read_bookmark
from tests.learner.support.trackers.written_run import KeepingTracker, WrittenRun


@contextmanager
def delivering(
    run: WrittenRun, tracker: KeepingTracker, *, is_finished: bool = False
) -> Iterator[Delivery]:
    delivery = Delivery("keeping", tracker, run.folder, {"run.seed": 1}, first_pause_s=0.001)
    delivery.start()
    try:
        yield delivery
    finally:
        delivery.request_end(is_finished=is_finished)
        delivery.join(60)
        assert not delivery.is_under_way


def test_a_tracker_gets_figures_and_tables_as_they_come(tmp_path: Path) -> None:
    run, tracker = WrittenRun(tmp_path), KeepingTracker()

    with delivering(run, tracker) as delivery:
        for step in range(1, 5):
            run.train(step)
            delivery.wake()
            tracker.wait(lambda: max(tracker.steps, default=0) == run.newest)
        run.keep(4)

    assert tracker.steps == [1, 2, 3, 4]
    assert [table.step for table in tracker.tables] == [4]
    assert (tracker.begun, tracker.ends, tracker.models) == ([None], [False], [])
    assert delivery.newest == 4


def test_a_tracker_that_was_away_gets_everything_later_and_once(tmp_path: Path) -> None:
    run, tracker = WrittenRun(tmp_path), KeepingTracker()
    failures = iter([OSError("no route"), None, OSError("503"), TimeoutError()])

    def fail() -> None:  # the first try to begin, and two of the first figures
        if (error := next(failures, None)) is not None:
            raise error

    for step in range(1, 21):
        run.train(step)
    tracker.fault = fail
    with capture_logs() as logs, delivering(run, tracker):
        tracker.wait(lambda: 20 in tracker.steps)

    assert tracker.steps == list(range(1, 21))
    assert [(line["event"], line.get("reason")) for line in logs] == [
        ("a tracker is unreachable", "no route"),
        ("a tracker is reachable again", None),
    ]


def test_what_a_tracker_refuses_is_left_out_counted_and_said_once(tmp_path: Path) -> None:
    run, tracker = WrittenRun(tmp_path), KeepingTracker()

    def refuse() -> None:
        if tracker.begun:
            raise ValueError("no such name\nand more")

    tracker.fault = refuse
    with capture_logs() as logs, delivering(run, tracker) as delivery:
        for step in (1, 2):
            run.train(step)
        run.keep(2)

    assert tracker.points == []
    assert delivery.refused >= 2
    assert [line["reason"] for line in logs] == ["ValueError: no such name"]


def test_a_later_life_goes_on_with_the_same_run_behind_what_was_sent(tmp_path: Path) -> None:
    run, first, second = WrittenRun(tmp_path), KeepingTracker(), KeepingTracker()
    for step in (1, 2, 3):
        run.train(step)
    run.keep(1)
    with delivering(run, first):
        pass
    run.journal.rewind(2)
    run.samples.rewind(2)
    for step in (3, 4):
        run.train(step)
    run.keep(4)

    with delivering(run, second):
        pass

    assert (first.steps, second.steps) == ([1, 2, 3], [4])
    assert (first.begun, second.begun) == ([None], ["the run"])
    assert [table.step for table in (*first.tables, *second.tables)] == [1, 4]


def test_only_a_run_that_has_finished_hands_its_model_over_and_once(tmp_path: Path) -> None:
    run, tracker = WrittenRun(tmp_path), KeepingTracker()
    (tmp_path / "model").mkdir()

    for is_finished in (False, True, True):
        with delivering(run, tracker, is_finished=is_finished):
            pass

    assert tracker.models == [tmp_path / "model"]
    assert tracker.ends == [False, True, True]


def test_a_bookmark_that_cannot_be_read_begins_anew(tmp_path: Path) -> None:
    (tmp_path / "trackers").mkdir()
    (tmp_path / "trackers" / "keeping.json").write_text("{")

    assert read_bookmark(tmp_path, "keeping").sent == {}
