"""From episodes to evidence: how answers begin and end, who made them, and what they got."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from actors.engine.character_tokenizer import make_tokenizer
from learner.reporting.advice.evidence import ActorShare, EndShare
from learner.reporting.advice.gathering import NO_VOCABULARY, Vocabulary, evidence_of
from learner.reporting.metrics import batch_figures
from learner.reporting.sample_writer import run_vocabulary
from tests.learner.support.made_episodes import make_episode
from tests.learner.support.tiny_run import tiny_settings

END, HEADER, NEWLINE = 2, 3, 10
VOCABULARY = Vocabulary({END: "<|im_end|>", HEADER: "<|im_start|>"}, END, {NEWLINE}.__contains__)


def evidence(*episodes, vocabulary=VOCABULARY):
    figures = batch_figures(episodes, step=1, lineage=1, lineages={1: 0}, uses={})
    return evidence_of(1, episodes, figures, vocabulary)


def test_rewards_and_their_parts_are_compared():
    counted = evidence(make_episode(0, reward=1.0), make_episode(1, reward=0.0))

    assert (counted.reward_min, counted.reward_max) == (0.0, 1.0)
    assert counted.varying_parts == ("exact",)


def test_an_answer_that_goes_on_behind_a_special_token_is_counted_once_for_it():
    counted = evidence(
        make_episode(0, completion=[8, END, 9, END, 9]),
        make_episode(1, completion=[8, END]),
        make_episode(2, completion=[HEADER, 9]),
        make_episode(3, completion=[]),
    )

    assert counted.run_past == {"<|im_end|>": 1, "<|im_start|>": 1}


def test_what_the_environment_wrote_is_not_the_policys():
    turns = make_episode(0, completion=[8, END, HEADER, 9, END], mask=[1, 1, 0, 0, 1])

    assert evidence(turns).run_past == {}


def test_a_branch_does_not_go_on_behind_the_token_before_it():
    completion = [8, END, 9, END, 9]

    assert evidence(make_episode(0, completion=completion, branches=[(2, 1)])).run_past == {
        "<|im_end|>": 1
    }
    both = make_episode(1, completion=completion, branches=[(2, 1), (4, 0)])
    assert evidence(make_episode(0), both).run_past == {}


def test_the_last_turn_begins_where_its_branch_does():
    turns = make_episode(completion=[*NO, 8, 9], branches=[(2, 0)])

    assert list(evidence(turns, vocabulary=LETTERS).ends) == [""]


def test_answers_do_not_run_into_each_other():
    assert evidence(make_episode(0, completion=[END]), make_episode(1)).run_past == {}


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [
        ([5, 6, END], True),
        ([5, 6, END, NEWLINE], True),
        ([5, END, NEWLINE, HEADER], False),
        ([5, END, HEADER, NEWLINE], False),
        ([5, END, 6], False),
        ([NEWLINE], False),
        ([], False),
    ],
)
def test_a_prompt_that_ends_with_the_end_of_a_turn_is_open(prompt, is_open):
    assert evidence(make_episode(0, prompt=prompt)).open_prompts == is_open


def test_special_tokens_that_end_answers_end_turns_too():
    other_end = replace(VOCABULARY, end=99)
    answered = make_episode(0, prompt=[5, END], completion=[8, END])

    assert evidence(answered, vocabulary=other_end).open_prompts == 1
    assert (
        evidence(replace(answered, finish_reason="length"), vocabulary=other_end).open_prompts == 0
    )


LETTERS = replace(VOCABULARY, stop=("no", "\n"), decode=lambda ids: "".join(map(chr, ids)))
NO = [*b"no"]


def test_answers_are_divided_by_what_ended_them():
    counted = evidence(
        make_episode(0, reward=1.0, completion=[*b"yes", END]),
        make_episode(1, reward=0.5, completion=[*b"yes" * 9, *NO]),
        replace(make_episode(2, completion=NO), environment_metrics={"unparsed": 1.0}),
        make_episode(3, completion=[*b"  ", *NO], finish_reason="environment"),
        make_episode(4, completion=[*NO, *b"yes"], finish_reason="length"),
        make_episode(5, completion=[NEWLINE]),
        vocabulary=LETTERS,
    )

    assert counted.ends == {
        "": EndShare(episodes=1, reward=1.0),
        "no": EndShare(episodes=3, reward=0.5 / 3, blank=2, unread=1),
        "\n": EndShare(episodes=1, reward=0.0, blank=1),
    }
    assert evidence(make_episode(0, completion=NO)).ends == {}, "the run has no such strings"


def test_only_the_last_turn_of_an_answer_is_looked_at():
    turns = make_episode(
        0, completion=[*b"a", *NO, *NO, *b"b", END], mask=[1] * 3 + [0] * 2 + [1] * 2
    )
    cut = make_episode(1, completion=[*b"a", END, 50, *NO], mask=[1, 1, 0, 1, 1])

    ends = evidence(turns, cut, vocabulary=LETTERS).ends

    assert ends == {"": EndShare(1, 0.0), "no": EndShare(1, 0.0, blank=1)}


def test_a_string_is_no_part_of_a_special_token(tmp_path: Path) -> None:
    tokenizer = make_tokenizer([])
    tokenizer.save_pretrained(tmp_path)
    settings = tiny_settings(tmp_path, run={"model": str(tmp_path), "stop": ["e"]})

    vocabulary = run_vocabulary(settings.run)

    yes, no = ([*tokenizer.encode(text)] for text in ("yes", "no<eos>"))
    assert evidence(make_episode(0, completion=yes), vocabulary=vocabulary).ends.keys() == {"e"}
    assert evidence(make_episode(0, completion=no), vocabulary=vocabulary).ends.keys() == {""}


def test_without_a_vocabulary_tokens_mean_nothing():
    counted = evidence(make_episode(0, prompt=[END], completion=[END, 8]), vocabulary=NO_VOCABULARY)

    assert (counted.run_past, counted.open_prompts) == ({}, 0)


def test_actors_have_their_rewards_and_times():
    slow = replace(make_episode(0, group_id=7, reward=1.0), incarnation="slow-1", finished_at=4.0)
    episodes = [slow, replace(slow, reward=0.0), make_episode(2, group_id=8)]

    assert evidence(*episodes).actors == {
        "slow-1": ActorShare(episodes=2, groups=1, reward=0.5, s_per_token=2.0),
        "actor": ActorShare(episodes=1, groups=1, reward=0.0, s_per_token=0.5),
    }


@pytest.mark.parametrize(
    ("metrics", "share"), [({}, None), ({"unparsed": 1.0}, 1.0), ({"scorer_errors": 0.0}, 0.0)]
)
def test_answers_that_the_scorer_could_not_read_are_a_share_of_those_it_counts(metrics, share):
    other = make_episode(1)

    counted = evidence(replace(make_episode(0), environment_metrics=metrics), other)

    assert counted.unparsed == share
