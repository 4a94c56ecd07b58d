"""Answers that a pattern is never done with: each costs its own score, and no time of the actor."""

from __future__ import annotations

import os
import signal
import time

import pytest

from actors.environments import answer_process
from actors.environments.answer_process import AnswerScorer
from actors.environments.dataset.scorers import make_scorer

ENDLESS = r"(a|aa)+b"  # twice the work for each letter more


def scorer_of(name: str) -> AnswerScorer:
    scorer = make_scorer(name, time_s=1, memory_mb=64)
    assert isinstance(scorer, AnswerScorer)
    return scorer


@pytest.fixture
def scorer() -> AnswerScorer:
    return scorer_of("regex")


@pytest.mark.parametrize(
    ("name", "reference", "right", "endless"),
    [
        ("regex", ENDLESS, "aaab", "a" * 64),
        ("json_schema", {"pattern": ENDLESS}, '"aaab"', '"' + "a" * 64 + '"'),
    ],
)
def test_a_pattern_of_the_user_costs_the_answer_that_it_is_never_done_with_and_no_other(
    name: str, reference: object, right: str, endless: str
) -> None:
    scorer = scorer_of(name)
    assert scorer(right, reference) == 1.0

    begin = time.thread_time()
    scores = [scorer(endless, reference), scorer(right, reference)]

    assert scores == [0.0, 1.0]
    assert time.thread_time() - begin < 0.5  # of this thread; the process had seconds


def test_many_members_of_an_array_that_must_differ_cost_no_time_of_the_actor() -> None:
    scorer = scorer_of("json_schema")
    members = ", ".join(f'{{"a": {n}}}' for n in range(20_000))

    begin = time.thread_time()
    score = scorer(f"[{members}]", {"uniqueItems": True})

    assert score in (0.0, 1.0)  # as it ends within its limit or not
    assert time.thread_time() - begin < 0.5


def test_a_process_that_hangs_or_dies_costs_its_own_answer(
    scorer: AnswerScorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert scorer("1", "1") == 1.0
    process = scorer._idle.queue[-1]
    assert process._process is not None

    process._process.kill()
    assert scorer("1", "1") == 1.0

    os.kill(process._process.pid, signal.SIGSTOP)
    monkeypatch.setattr(answer_process, "ANSWER_S", 0.2)
    assert scorer("1" * (1 << 20), "1") == 0.0  # more than a pipe takes
    monkeypatch.undo()
    assert scorer("1", "1") == 1.0


@pytest.mark.parametrize(("name", "reference"), [("regex", "("), ("json_schema", "{")])
def test_a_reference_is_checked_with_and_without_an_answer(name: str, reference: str) -> None:
    scorer = scorer_of(name)
    for text in ("", " ", "anything"):
        with pytest.raises(ValueError, match=r"must be a"):
            scorer(text, reference)
    assert all(process._process is None for process in scorer._idle.queue[:-1])


def test_half_a_character_and_much_text_arrive_as_they_are(scorer: AnswerScorer) -> None:
    assert scorer("<answer>\ud83d</answer>", "\ud83d") == 1.0
    assert scorer("1" * (1 << 20), "1+") == 1.0
