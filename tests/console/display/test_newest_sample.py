"""The newest sampled text of a run."""

import base64

import msgspec

from console.display.progress import READ_BYTES, NewestSample
from learner.reporting.samples import SampleLine, encoded
from tests.console.support.recorded_run import FOLDER


def prompt_of(newest):
    sample = newest.read_newest()
    return None if sample is None else sample.prompt


TWO = FOLDER.samples.read_bytes().splitlines(keepends=True)


def test_the_last_whole_line_is_the_newest_text(tmp_path):
    path = tmp_path / "samples.jsonl"
    newest = NewestSample(path)
    assert newest.read_newest() is None

    path.write_bytes(TWO[0])
    assert prompt_of(newest) == "hapale>"
    with path.open("ab") as file:
        file.write(TWO[1][:-20])
        file.flush()
        assert prompt_of(newest) == "hapale>"
        file.write(TWO[1][-20:])
    assert prompt_of(newest) == "simaba>"


def test_a_text_of_128k_tokens_is_shown(tmp_path):
    path = tmp_path / "samples.jsonl"
    row = msgspec.json.decode(TWO[1], type=SampleLine)
    row.turns[0].text = "word " * 2**17
    row.logprobs = base64.b64encode(bytes(2**18)).decode()
    path.write_bytes(TWO[0] + encoded([row]))

    assert prompt_of(NewestSample(path)) == "simaba>"


def test_damaged_lines_are_passed_over_and_old_ones_not_read(tmp_path):
    path = tmp_path / "samples.jsonl"
    path.write_bytes(TWO[0] + b"\xff\xfe not json\n" + b'{"step": "x"}\n')
    assert prompt_of(NewestSample(path)) == "hapale>"

    path.write_bytes(TWO[0] + b"x" * READ_BYTES + b"\n")
    assert NewestSample(path).read_newest() is None


def test_a_part_that_was_put_away_leaves_its_text_until_there_is_another(tmp_path):
    path = tmp_path / "samples.jsonl"
    path.write_bytes(TWO[0])
    newest = NewestSample(path)
    newest.read_newest()

    path.unlink()
    path.touch()
    assert prompt_of(newest) == "hapale>"
    path.write_bytes(TWO[1])
    assert prompt_of(newest) == "simaba>"
