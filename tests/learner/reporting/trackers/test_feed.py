"""What a tracker has not got yet, read from the files of a run that goes on."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from learner.reporting.trackers import feed as feed_module
from learner.reporting.trackers.feed import COLUMNS, Feed
from tests.learner.support.trackers.written_run import WrittenRun


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def steps(feed: Feed, limit: int = 100) -> list[int]:
    return [point.step for point in feed.points(limit)[1]]


def test_figures_come_in_order_with_the_time_of_their_batch(
    tmp_path: Path, opened: ExitStack
) -> None:
    run, feed = WrittenRun(tmp_path), opened.enter_context(closing(Feed(tmp_path, {})))
    run.train(1, reward=0.25)
    run.train(2)
    run.evaluate(2, 0.5)

    stream, points = feed.points(1)
    assert (stream, [(each.step, each.time, each.figures) for each in points]) == (
        "batches",
        [(1, 1e9 + 1, {"reward/mean": 0.25})],
    )
    assert steps(feed) == [2]
    stream, points = feed.points(9)
    assert (stream, points[0].figures) == ("evaluations", {"eval/accuracy": 0.5})
    assert steps(feed) == []


def test_what_was_sent_is_left_out_also_where_a_resume_wrote_the_file_anew(
    tmp_path: Path, opened: ExitStack
) -> None:
    run = WrittenRun(tmp_path)
    for step in (1, 2, 3, 4):
        run.train(step)
    feed = opened.enter_context(closing(Feed(tmp_path, {"batches": 2})))
    assert steps(feed) == [3, 4]

    run.journal.rewind(2)
    for step in (3, 4, 5):
        run.train(step)

    assert steps(feed) == [5]


def test_a_damaged_line_is_left_out(tmp_path: Path, opened: ExitStack) -> None:
    run, feed = WrittenRun(tmp_path), opened.enter_context(closing(Feed(tmp_path, {})))
    run.train(1)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": \n[]\n{"step": "3"}\n' + b"[" * 100_000 + b"\n")
    run.train(2)

    assert steps(feed) == [1, 2]


def test_a_table_is_complete_two_batches_after_its_last_row(
    tmp_path: Path, opened: ExitStack
) -> None:
    run, feed = WrittenRun(tmp_path), opened.enter_context(closing(Feed(tmp_path, {})))
    run.train(1)
    run.keep(1, episodes=2)
    feed.points(9)
    assert feed.tables(is_ended=False) == []
    run.train(2)
    run.keep(1)
    feed.points(9)
    assert feed.tables(is_ended=False) == []
    run.train(3)
    feed.points(9)
    assert feed.tables(is_ended=False) == []
    run.train(4)
    feed.points(9)

    (table,) = feed.tables(is_ended=False)

    assert (table.name, table.step, len(table.rows)) == ("samples/train", 1, 3)
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert (row["step"], row["environment"], row["completion"]) == (1, "spell", "abc")
    assert tuple(table.columns) == COLUMNS
    assert feed.tables(is_ended=True) == []


def test_the_next_step_of_a_kind_or_the_end_completes_a_table(
    tmp_path: Path, opened: ExitStack
) -> None:
    run, feed = (
        WrittenRun(tmp_path),
        opened.enter_context(closing(Feed(tmp_path, {"samples/train": 0}))),
    )
    run.keep(0, kind="train")
    run.keep(1, kind="train")
    run.keep(0, kind="eval")
    run.keep(2, kind="train")

    assert [(each.name, each.step) for each in feed.tables(is_ended=False)] == [
        ("samples/train", 1)
    ]
    rest = feed.tables(is_ended=True)
    assert sorted((each.name, each.step) for each in rest) == [
        ("samples/eval", 0),
        ("samples/train", 2),
    ]


def test_a_table_has_bounded_rows_and_texts(tmp_path: Path, opened: ExitStack) -> None:
    run, feed = WrittenRun(tmp_path), opened.enter_context(closing(Feed(tmp_path, {})))
    run.keep(1, episodes=feed_module.MAX_ROWS + 1, text="a" * 1500 + "b" * 1500)

    (table,) = feed.tables(is_ended=True)

    assert len(table.rows) == feed_module.MAX_ROWS
    text = table.rows[0][COLUMNS.index("completion")]
    assert text == "a" * 1000 + " [... 1000 characters ...] " + "b" * 1000


def test_evaluations_that_end_in_another_order_all_come(tmp_path: Path, opened: ExitStack) -> None:
    run, feed = WrittenRun(tmp_path), opened.enter_context(closing(Feed(tmp_path, {})))
    for step in (6, 3):
        run.evaluate(step, 0.5)
        run.keep(step, kind="eval", episodes=2)

    assert steps(feed) == [6, 3]
    found = feed.tables(is_ended=True)
    assert [(each.step, len(each.rows)) for each in found] == [(6, 2), (3, 2)]
