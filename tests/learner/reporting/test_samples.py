"""Kept episodes: their lines, their files, and the thread that writes them."""

from __future__ import annotations

import gzip
import json
import random
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from buffer.record.episode import PolicyVersion
from configs.settings import RunSettings
from configs.tables.run import SampleSettings
from learner.data.evaluation import EvaluationAnswer
from learner.reporting import sample_writer
from learner.reporting.sample_writer import Decode, SampleWriter
from learner.reporting.samples import (
    Origin,
    SampleFiles,
    SampleLine,
    encoded,
    logprobs_of,
    read_samples,
    sample_line,
    sample_paths,
)
from tests.learner.support.made_episodes import make_episode

MIB = 2**20


def letters(token_ids: Sequence[int]) -> str:
    return "".join(chr(ord("a") + token) for token in token_ids)


def line(step: int, task: int = 0, *, text_bytes: int = 0) -> SampleLine:
    noise = random.Random(f"{step} {task}").randbytes(text_bytes // 2).hex()
    episode = make_episode(task, group_id=task // 2)
    return sample_line(Origin(step, 1, "spell"), episode, lambda _: noise)


def steps_of(folder: Path) -> list[int]:
    return [each.step for each in read_samples(folder)]


def test_a_line_has_the_turns_the_log_probs_and_where_they_come_from() -> None:
    episode = make_episode(
        7,
        completion=[0, 1, 2, 3, 4],
        mask=[1, 1, 0, 0, 1],
        logprobs=[-0.5, -1e9, 0.0, 0.0, -2.25],
        versions=[(PolicyVersion(1, 3), 0), (PolicyVersion(1, 4), 4)],
        reward=1.0,
    )

    made = sample_line(Origin(5, 1, "spell"), episode, letters)

    assert [(turn.by, turn.text, turn.tokens) for turn in made.turns] == [
        ("policy", "ab", 2),
        ("environment", "cd", 2),
        ("policy", "e", 1),
    ]
    assert (made.text, made.tokens, made.prompt) == ("abcde", 5, "fgh")
    assert logprobs_of(made) == [-0.5, -65504.0, 0.0, 0.0, -2.25]
    assert made.versions == [(1, 3, 0), (1, 4, 4)]
    assert (made.reward, made.parts, made.finish, made.actor) == (1, {"exact": 1}, "stop", "actor")


def test_a_turn_says_where_its_branch_begins() -> None:
    episode = make_episode(
        completion=[0, 1, 2, 3, 4, 5, 6],
        mask=[1, 1, 1, 1, 0, 1, 1],
        branches=[(3, 1), (4, None), (6, 0)],
    )

    made = sample_line(Origin(1, 1, "e"), episode, letters)

    assert list(zip(made.headings, [turn.text for turn in made.turns], strict=True)) == [
        ("policy, tokens 1 to 3", "abc"),
        ("policy, tokens 4 to 4, branch from token 1", "d"),
        ("environment, tokens 5 to 5, root", "e"),
        ("policy, tokens 6 to 6", "f"),
        ("policy, tokens 7 to 7, branch from token 0", "g"),
    ]
    assert made.text == "abc\n[branch from token 1]\nd\n[root]\nef\n[branch from token 0]\ng"
    (read,) = [json.loads(line) for line in encoded([made]).splitlines()]
    assert [turn.get("branch") for turn in read["turns"]] == [None, 1, "root", None, 0]


def test_a_completion_that_is_not_trained_at_all_is_shown_as_the_policys() -> None:
    made = sample_line(Origin(1, 1, "e"), make_episode(completion=[0, 1], mask=[0, 0]), letters)

    assert [(turn.by, turn.text) for turn in made.turns] == [("policy", "ab")]
    assert made.trained_tokens == 0


def test_tokens_of_no_tokenizer_are_named_and_end_nothing() -> None:
    def refuse(token_ids: Sequence[int]) -> str:
        raise OverflowError(f"no token {min(token_ids)}")

    made = sample_line(Origin(1, 1, "e"), make_episode(completion=[-1, -2]), refuse)

    assert made.text == "[2 tokens that the tokenizer refuses: no token -2]"


def test_the_same_question_is_recognised_at_another_step() -> None:
    one, other = make_episode(1, prompt=[1, 2]), make_episode(2, prompt=[1, 3])

    made = [sample_line(Origin(s, 1, "e"), e, letters) for s, e in ((1, one), (9, one), (9, other))]

    assert made[0].question == made[1].question != made[2].question


def test_files_stay_below_their_bound_and_keep_the_beginning(tmp_path: Path) -> None:
    files = SampleFiles(tmp_path, max_bytes=MIB)
    files.rewind(0)

    most = 0
    for step in range(1, 101):
        files.append(encoded([line(step, text_bytes=50_000)]))
        most = max(most, sum(path.stat().st_size for path in tmp_path.iterdir()))

    assert most <= MIB
    kept = steps_of(tmp_path)
    assert kept[0] == 1
    assert kept[-1] == 100
    assert kept == sorted(set(kept))
    assert 10 < len(kept) < 30
    names = [path.name for path in sample_paths(tmp_path)]
    assert names[0] == "samples-00001.jsonl.gz"
    assert {path.name for path in tmp_path.iterdir()} == set(names)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


def test_a_resume_removes_later_lines_from_all_files(tmp_path: Path) -> None:
    files = SampleFiles(tmp_path, max_bytes=MIB)
    files.rewind(0)
    for step in range(1, 11):
        files.append(encoded([line(step, text_bytes=50_000)]))
    assert len(sample_paths(tmp_path)) > 3

    SampleFiles(tmp_path, max_bytes=MIB).rewind(5)

    assert steps_of(tmp_path) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("cut", [70, -1])
def test_what_a_killed_process_leaves_is_mended(tmp_path: Path, cut: int) -> None:
    whole = encoded([line(1), line(2)])
    (tmp_path / "samples-00001.jsonl").write_bytes(whole)  # renamed, and not compressed yet
    (tmp_path / ".samples-00001.jsonl.gz.77").write_bytes(b"half of i")
    (tmp_path / "samples.jsonl").write_bytes(encoded([line(3)]) + encoded([line(5)])[:cut])
    assert steps_of(tmp_path)[:3] == [1, 2, 3]

    files = SampleFiles(tmp_path, max_bytes=MIB)
    files.rewind(9)
    files.append(encoded([line(4)]))

    assert steps_of(tmp_path) == [1, 2, 3, 4]
    assert gzip.decompress((tmp_path / "samples-00001.jsonl.gz").read_bytes()) == whole
    assert {path.name for path in tmp_path.iterdir()} == {"samples-00001.jsonl.gz", "samples.jsonl"}


def test_damaged_lines_and_files_are_left_out(tmp_path: Path) -> None:
    wrong = [b"\xff\xfe", b'{"step": 1}', b"[" * 10_000, b"null", b'{"step": "x"}']
    (tmp_path / "samples.jsonl").write_bytes(b"\n".join([*wrong, encoded([line(3)])]))
    (tmp_path / "samples-00001.jsonl.gz").write_bytes(gzip.compress(encoded([line(1)]))[:-9])

    assert steps_of(tmp_path)[-1] == 3

    SampleFiles(tmp_path, max_bytes=MIB).rewind(5)
    assert steps_of(tmp_path)[-1] == 3


def make_writer(folder: Path, *, step: int = 0, decode: Decode = letters) -> SampleWriter:
    run = RunSettings(
        name="r",
        directory=folder,
        model="init",
        samples=SampleSettings(every=2, groups=2, max_mb=1),
    )
    return SampleWriter(
        run, step=step, lineage=1, environment_of=lambda group: f"env-{group % 2}", decode=decode
    )


BATCH = [make_episode(task, group_id=task // 3) for task in range(15)]


def test_a_few_groups_of_every_nth_batch_are_kept_and_the_first(tmp_path: Path) -> None:
    writer = make_writer(tmp_path)
    writer.start()

    for step in range(1, 6):
        writer.keep_batch(step, BATCH)
    writer.close()

    kept = list(read_samples(tmp_path / "r"))
    assert [each.step for each in kept] == [1] * 6 + [2] * 6 + [4] * 6
    for step in (1, 2, 4):
        tasks = sorted(each.task for each in kept if each.step == step)
        assert tasks == [task for task in range(15) if task // 3 in {t // 3 for t in tasks}]
    assert all(each.environment == f"env-{each.group % 2}" for each in kept)
    assert (writer.dropped, writer.alerts()) == (0, [])


def test_a_batch_that_is_trained_again_is_there_once(tmp_path: Path) -> None:
    first = make_writer(tmp_path)
    first.start()
    for step in range(1, 5):
        first.keep_batch(step, BATCH)
    first.close()
    before = (tmp_path / "r" / "samples.jsonl").read_bytes()

    second = make_writer(tmp_path, step=2)
    second.start()
    for step in (3, 4):
        second.keep_batch(step, BATCH)
    second.close()

    assert (tmp_path / "r" / "samples.jsonl").read_bytes() == before


def test_the_greedy_answers_of_an_evaluation_and_a_few_others_are_kept(tmp_path: Path) -> None:
    writer = make_writer(tmp_path)
    writer.start()
    episode = make_episode(5, purpose="eval")

    writer.keep_answers(0, [EvaluationAnswer("spell", 0, sample, episode) for sample in range(9)])
    writer.close()

    text = (tmp_path / "r" / "samples.jsonl").read_text()
    lines = [json.loads(each) for each in text.splitlines()]
    assert [each["sample"] for each in lines] == [0, 1, 2, 3, 4]
    assert {each["kind"] for each in lines} == {"eval"}
    assert {each["environment"] for each in lines} == {"spell"}


def test_episodes_are_dropped_and_counted_when_the_thread_is_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_writer, "MAX_WAITING_TOKENS", 22)  # four episodes of five tokens
    monkeypatch.setattr(sample_writer, "BATCHES", 0)
    goes_on = threading.Event()

    def slow(token_ids: Sequence[int]) -> str:
        assert goes_on.wait(60)
        return letters(token_ids)

    writer = make_writer(tmp_path, decode=slow)
    writer.start()

    writer.keep_batch(2, BATCH)  # returns although nothing can be written
    assert writer.dropped == 2
    goes_on.set()
    writer.close()

    assert len(list(read_samples(tmp_path / "r"))) == 4


def test_the_longest_groups_of_a_batch_always_have_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_writer, "MAX_WAITING_TOKENS", 22)
    writer = make_writer(tmp_path)
    writer.start()

    writer.keep_batch(2, BATCH)
    writer.close()

    assert (writer.dropped, len(list(read_samples(tmp_path / "r")))) == (0, 6)


def test_the_end_of_the_thread_is_heard_of_and_ends_nothing_else(tmp_path: Path) -> None:
    def broken(_: Sequence[int]) -> str:
        raise OSError("no space left")

    writer = make_writer(tmp_path, decode=broken)
    writer.start()
    writer.keep_batch(2, BATCH)
    writer.close()

    (alert,) = writer.alerts()
    assert alert.name == "samples_not_kept"
    assert "got OSError: no space left; mend that" in alert.text
    writer.keep_batch(4, BATCH)
    assert writer.dropped == 6


def test_nothing_is_kept_without_room_for_it(tmp_path: Path) -> None:
    run = RunSettings(name="r", directory=tmp_path, model="none", samples=SampleSettings(max_mb=0))
    writer = SampleWriter(run, step=0, lineage=1, environment_of=str)
    writer.start()

    writer.keep_batch(1, BATCH)
    writer.keep_answers(0, [EvaluationAnswer("spell", 0, 0, BATCH[0])])
    writer.close()

    assert not (tmp_path / "r").exists()
    assert (writer.dropped, writer.alerts()) == (0, [])
