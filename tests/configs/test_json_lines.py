"""Files that are followed while others append to them, rename, replace and empty them."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs import json_lines
from configs.json_lines import JsonLinesFollower, LineFollower


def test_lines_come_once_and_a_line_that_is_being_written_comes_whole(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    follower = LineFollower(path)
    assert follower.read(9) == []

    path.write_bytes(b"one\ntwo\nthr")
    assert follower.read(1) == [b"one\n"]
    assert follower.read(9) == [b"two\n"]
    assert follower.read(9) == []

    with path.open("ab") as file:
        file.write(b"ee\n")
    assert follower.read(9) == [b"three\n"]


def test_a_renamed_file_is_read_to_its_end_before_the_next(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    follower = LineFollower(path)
    path.write_bytes(b"one\n")
    assert follower.read(9) == [b"one\n"]

    with path.open("ab") as file:
        file.write(b"two\n")
    path.rename(tmp_path / "older")
    assert follower.read(1) == [b"two\n"]
    assert follower.read(9) == []
    path.write_bytes(b"three\n")

    assert follower.read(9) == [b"three\n"]


def test_a_file_that_was_replaced_is_another_and_an_emptied_one_is_not(
    tmp_path: Path,
) -> None:
    path = tmp_path / "lines"
    follower = LineFollower(path)
    path.write_bytes(b"one\ntwo\n")
    assert (follower.read(), follower.num_files) == ([b"one\n", b"two\n"], 1)

    (tmp_path / "new").write_bytes(b"one\n")
    (tmp_path / "new").replace(path)
    assert (follower.read(), follower.num_files) == ([b"one\n"], 2)

    path.write_bytes(b"1\n")
    assert (follower.read(), follower.num_files) == ([b"1\n"], 2)


def test_no_call_returns_lines_of_two_files(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    follower = LineFollower(path)
    path.write_bytes(b"one\n")
    assert follower.read(1) == [b"one\n"]
    with path.open("ab") as file:
        file.write(b"two\n")
    (tmp_path / "new").write_bytes(b"three\n")
    (tmp_path / "new").replace(path)

    assert (follower.read(), follower.num_files) == ([b"two\n"], 1)
    assert (follower.read(), follower.num_files) == ([b"three\n"], 2)


def test_a_line_begun_in_a_file_that_is_emptied_is_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    follower = LineFollower(path)
    path.write_bytes(b"one\nhalf a line")
    assert follower.read() == [b"one\n"]

    path.write_bytes(b"1\n")

    assert follower.read() == [b"1\n"]


def test_of_a_long_file_the_newest_lines_are_read_once(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"one\ntwo\nthree\n")
    follower = LineFollower(path, newest_bytes=8)
    assert follower.read() == [b"three\n"]

    (tmp_path / "new").write_bytes(b"a longer first line\n")
    (tmp_path / "new").replace(path)

    assert follower.read() == [b"a longer first line\n"]


def test_what_is_there_may_be_taken_as_read(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    rows = JsonLinesFollower(path)
    rows.skip_to_end()
    path.write_text('{"a": 1}\n')
    rows.skip_to_end()
    with path.open("a") as file:
        file.write('{"a": 2}\n')

    assert rows.read_new() == [{"a": 2}]


def test_a_huge_file_is_read_in_parts_and_a_huge_line_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_lines, "MAX_READ_BYTES", 8)
    monkeypatch.setattr(json_lines, "MAX_LINE_BYTES", 8)
    path = tmp_path / "lines"
    path.write_bytes(b"one\ntwo\n" + b"x" * 12 + b"\nend\n")
    follower = LineFollower(path)

    assert follower.read() == [b"one\n", b"two\n"]
    assert follower.read() == [b"x" * 8]
    assert follower.read() == [b"xxxx\n", b"end\n"]
