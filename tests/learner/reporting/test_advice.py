"""Each rule concludes on its fault, injected into a recorded run, and on nothing of that run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest

from learner.reporting.advice.advisor import RULES, Advisor
from learner.reporting.advice.evidence import (
    ActorShare,
    EndShare,
    Evidence,
    Rule,
    StoreFigures,
    Window,
)
from tests.learner.support.advice.demo_evidence import (
    ROOT,
    Fault,
    broken,
    considered,
    demo,
    demo_settings,
)

WHERE = "ValueError: no, at grading.py:7: `raise ValueError('no')`"


def store(evidence: Evidence, **changes: Any) -> dict[str, Any]:
    return {"store": replace(evidence.store, **changes)}


def flat(reward: float) -> dict[str, Any]:
    rewards = dict.fromkeys(("reward_mean", "reward_min", "reward_max"), reward)
    return {**rewards, "reward_std": 0.0, "zero_variance_groups": 16, "varying_parts": ()}


def two_actors(bad: Mapping[str, Any]) -> dict[str, Any]:
    good = ActorShare(episodes=128, groups=8, reward=0.6, s_per_token=0.1)
    return {"actors": {"good-1": good, "bad-1": replace(good, **bad)}}


def ended(evidence: Evidence, ends: Mapping[str, tuple[int, float]], **of: int) -> dict[str, Any]:
    """Answers by what ended them, with their mean reward; the first of them have `of`."""
    assert sum(count for count, _ in ends.values()) <= evidence.episodes
    shares = {end: EndShare(count, reward) for end, (count, reward) in ends.items()}
    first = next(iter(ends))
    return {"ends": {**shares, first: replace(shares[first], **of)}}


@dataclass(frozen=True)
class Case:
    rule: str
    fault: Fault
    text: str
    """A part of what it is to conclude, as a pattern."""
    settings: Mapping[str, object] = field(default_factory=dict)
    begin: int = 20
    """First batch with the fault."""


CASES = [
    Case(
        "reward_failing",
        lambda e: store(e, data_failures=(e.step - 19) * 100, data_failure=WHERE),
        r"run\.reward, now r\.py:f, failed \d+ times in \d+ attempts \(28%\).*grading\.py:7",
        {"run__reward": "r.py:f"},
    ),
    Case("prompt_left_open", lambda e: {"open_prompts": e.groups}, "100% of .* chat template"),
    Case(
        "stop_token_ignored",
        lambda e: {
            "run_past": {"<|im_end|>": 200, "<tool>": 3},
            "response_truncated_fraction": 250 / 256,
        },
        r"78% .*<\|im_end\|>.*run\.stop \(now \[\]\)",
    ),
    Case(
        "leasing_paused",
        lambda e: store(e, paused=f"11 of the last 1000 tasks died, of: {WHERE}", dead=e.step),
        r"because 11 of .*grading\.py:7.*buffer resume .*max_data_failures, now 3,",
    ),
    Case(
        "stop_string_early",
        lambda e: {**ended(e, {"e": (90, 0.2), "": (160, 0.6)}), "reward_std": 0.4},
        r"'e' of run\.stop \(now \['x', 'e'\]\) .* 35% of .*rewards are 0\.4 below",
        {"run__stop": "[x, e]"},
    ),
    Case(
        "stop_string_early",
        lambda e: {**ended(e, {"\n": (256, 0.0)}, blank=100), **flat(0.0), "unparsed": 0.9},
        r"'\\n' of run\.stop .* 100% of .*2000 of those say nothing before it",
        {"run__stop": '["\\n"]'},
    ),
    Case(
        "stop_string_early",
        lambda e: {**ended(e, {"</a>": (256, 0.0)}, unread=250), **flat(0.0), "unparsed": 0.98},
        r"'</a>' of run\.stop .* 100% of .*no answer in 5000 of those",
        {"run__stop": "[</a>]"},
    ),
    Case(
        "engine_disagrees",
        lambda _: {"lag0_tokens": 500, "lag0_logprob_diff_mean": 0.3, "kl": 0.4},
        r"0\.3 nats .*run\.head_dtype \(now null\)",
    ),
    Case(
        "engine_disagrees",
        lambda _: {
            "lag0_tokens": 64,
            "lag0_logprob_diff_mean": 0.04,
            "lag0_temperature_excess": -0.1,
            "lag0_temperature_weight": 40.0,
        },
        r"samples at 0\.9 times run\.temperature \(now 1\), .*actors\.engine_args",
    ),
    Case(
        "learning_rate_high",
        lambda _: {"kl": 2.0, "policy_lag_mean": 1.5, "entropy": 0.001},
        r"0\.89 nats .*learner\.lr \(now 0\.02\)",
        {"learner__lr": 0.02},
    ),
    Case(
        "learning_rate_high",
        lambda e: {"kl": 2.0 if e.step == 20 else 0.0, "entropy": 1e-4, **flat(0.0)},
        r"jumped by 2 nats per token at batch 20.*learner\.lr",
    ),
    Case(
        "temperature_low",
        lambda e: {"entropy": 1e-5, "zero_variance_groups": e.groups},
        r"run\.temperature 0\.01 .*set run\.temperature to 1\.0",
        {"run__temperature": 0.01},
    ),
    Case(
        "answers_cut_off",
        lambda _: {"response_truncated_fraction": 1.0, **flat(0.0)},
        r"100% .*run\.max_completion_tokens \(now 12\)",
    ),
    Case("answers_not_read", lambda _: {"unparsed": 0.97, **flat(0.0)}, "no answer in 97% of"),
    Case(
        "clip_bounds_odd",
        lambda _: {"clipped": 0.93},
        r"algorithm\.clip_high \(now 0\.001\) is 280 times narrower .*93% .*get 0\.28",
        {"algorithm__clip_high": 0.001},
    ),
    Case(
        "clip_bounds_odd",
        lambda _: {},
        r"algorithm\.clip_low \(now 0\.2\) is 667 times wider than the 0\.0003",
        {"algorithm__surrogate": "gspo", "algorithm__clip_low": 0.2},
    ),
    Case(
        "actor_unlike_others",
        lambda _: two_actors({"reward": 0.05}),
        r"the rewards of bad-1 are 0\.55 below",
    ),
    Case(
        "actor_unlike_others",
        lambda e: {
            "actors": {
                name: replace(each, episodes=256, groups=16)
                for name, each in two_actors({"reward": 0.05})["actors"].items()
                if (name == "bad-1") == (e.step % 4 < 2)
            }
        },
        r"the rewards of bad-1 are 0\.55 below",
    ),
    Case(
        "entropy_gone",
        lambda _: {"entropy": 0.001, "reward_mean": 0.3, "zero_variance_groups": 15},
        r"fell from 0\.\d+ to 0\.001 .*algorithm\.entropy_bonus \(now 0\)",
    ),
    Case(
        "lag_high",
        lambda _: {"effective_sample_size": 0.1, "policy_lag_mean": 2.0},
        r"10% of them .*run\.max_policy_lag \(now 2\)",
    ),
    Case("reward_constant", lambda _: flat(0.0), r"all of the last 1280 episodes had reward 0, so"),
    Case(
        "reward_constant",
        lambda _: {**flat(1.0), "varying_parts": ("exact",)},
        r"although its parts differ \(exact\).*rewards\.weights \(now {'score': 1\.0}\)",
        {"rewards__weights": "{score: 1.0}"},
    ),
    Case(
        "reward_constant",
        lambda _: {**flat(0.0), "varying_parts": ("exact", "position")},
        r"0, although its parts differ \(exact, position\): r\.py:f \(run\.reward\) does not",
        {"run__reward": "r.py:f"},
    ),
    Case("reward_constant", lambda _: flat(1.0), r"reward 1, the best so far: .*solved"),
    Case(
        "groups_flat",
        lambda _: {"zero_variance_groups": 15, "reward_mean": 0.1},
        r"94% .*too hard.*run\.group_size \(now 16\)",
    ),
    Case(
        "groups_flat",
        lambda _: {"zero_variance_groups": 15, "reward_mean": 0.8},
        "too easy.*filter_zero_variance.*set run.sampler to difficulty",
    ),
    Case(
        "groups_flat",
        lambda _: {"zero_variance_groups": 15, "reward_mean": 0.8},
        "too easy.*filter_zero_variance: true, or raise run.group_size",
        {"run__sampler": "difficulty", "run__sampler_prompts": "9"},
    ),
    Case(
        "dead_letters_grow",
        lambda e: store(e, dead=e.step, death=WHERE),
        r"19 tasks died .*grading\.py:7.*broker\.max_data_failures \(now 3\)",
    ),
    Case(
        "groups_dropped",
        lambda e: {"dropped": {"stale": 3, "zero_variance": 9}},
        r"\d\.\d% of the groups .*stale: raise run\.max_policy_lag \(now 2\)",
    ),
    Case(
        "tokens_masked",
        lambda _: {"masked": 0.6},
        r"60% of the tokens .*raise run\.max_policy_lag \(now 2\), set buffer\.on_stale: train",
    ),
    Case("actor_slow", lambda _: two_actors({"s_per_token": 0.18}), "bad-1 takes 1.8 times"),
    Case(
        "learner_waits",
        lambda e: {"wait_s": 0.45, "span_s": 1.0, **store(e, actors=4)},
        r"45% of the time .*8 actors instead of 4",
    ),
    Case(
        "temperature_high",
        lambda _: {"greedy_reward": 0.36, "reward_mean": 0.05, "reward_std": 0.22},
        r"reward of 0\.36 at the first evaluation, .* first 3 batches 0\.05.*run\.temperature",
        begin=0,
    ),
    Case(
        "actors_wait",
        lambda e: {"workless": 1, "cards": 2, **store(e, actors=3)},
        r"100% .*3 actors wait for.*learner\.ranks, now 1, of 2 cards\), or run fewer",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_a_rule_concludes_on_its_fault_and_is_shown_first(case):
    rule = next(rule for rule in RULES if rule.name == case.rule)

    advice = considered(demo_settings(**case.settings), broken(case.fault, begin=case.begin))[-1]

    assert advice[0].rule == rule.name
    assert re.search(case.text, advice[0].text), advice[0].text
    assert not rule.explains & {each.rule for each in advice}


def test_the_page_has_each_rule_in_the_row_of_a_table():
    page = (ROOT / "docs" / "when-reward-does-not-rise.md").read_text(encoding="utf-8")

    rows = re.findall(r"^\| `(\w+)` \| .+ \| .+ \| .+ \|$", page, re.MULTILINE)
    assert sorted(rows) == sorted(rule.name for rule in RULES)
    assert len(page.splitlines()) < 100


def test_every_rule_has_a_case():
    assert {case.rule for case in CASES} == {rule.name for rule in RULES}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_concludes_nothing_on_the_demo(rule):
    settings, window = demo_settings(), Window()

    concluded = []
    for evidence in demo():
        window.add(evidence)
        if len(window) >= rule.batches:
            concluded.append(rule.conclude(window, settings, False))

    assert len(concluded) > 50
    assert set(concluded) == {None}


def concluded(rule: str, evidence: Evidence, batches: int = 50, **overrides: object) -> str:
    """What a rule concludes after so many batches with the same evidence."""
    window = Window()
    for _ in range(batches):
        window.add(evidence)
    found = next(each for each in RULES if each.name == rule)
    return found.conclude(window, demo_settings(**overrides), False) or ""


def test_looks_are_counted_however_many_batches_fall_between_them():
    quick, slow = replace(demo()[0], looks=0), replace(demo()[0], looks=40, workless=38)

    assert not concluded("actors_wait", replace(quick, looks=1, workless=1), batches=4)
    assert "100% of the last 5 looks" in concluded(
        "actors_wait", replace(quick, looks=1, workless=1), 5
    )
    assert not concluded("actors_wait", quick)
    assert "95% of the last 40 looks" in concluded("actors_wait", slow, batches=2)
    assert not concluded("actors_wait", replace(slow, workless=30), batches=2)


@pytest.mark.parametrize("rule", ["reward_constant", "groups_flat"])
def test_a_reward_that_is_constant_is_no_fault_where_a_teacher_is_learned_from(rule):
    evidence = replace(demo()[0], **flat(0.0))

    assert concluded(rule, evidence)
    assert not concluded(rule, evidence, algorithm__teacher="t")
    assert not concluded(rule, evidence, algorithm__teacher_prompt="hint")


@pytest.mark.parametrize(
    ("actors", "machine", "settings", "ways"),
    [
        # An actor less would be none, and the learner has all cores already.
        (1, {"cores": 2}, {"learner__threads": 2}, "train fewer tokens"),
        (1, {"cores": 2}, {}, "let it compute on more cores (learner.threads, now 1, of 2 cores)"),
        (1, {"cards": 1}, {}, "train fewer tokens"),
        (2, {"cards": 1}, {}, "run fewer actors (actors.count, now 2)"),
    ],
)
def test_actors_that_wait_lead_to_what_can_be_done_here(actors, machine, settings, ways):
    evidence = replace(demo()[0], looks=9, workless=9, store=StoreFigures(actors=actors), **machine)

    text = concluded("actors_wait", evidence, actors__count=actors, **settings)

    assert text.partition("; ")[2].startswith(ways), text
    assert "ranks" not in text
    assert ("fewer actors" in text) == (actors > 1)


@pytest.mark.parametrize(
    ("changes", "settings", "is_hot"),
    [
        ({}, {}, True),
        ({"greedy_reward": None}, {}, False),
        ({"greedy_reward": 0.2}, {}, False),  # within a standard deviation
        ({}, {"run__temperature": 0.3}, False),
        ({"reward_std": 0.0}, {}, False),  # a constant reward has another cause
    ],
)
def test_sampled_answers_far_below_greedy_ones_ask_for_a_lower_temperature(
    changes, settings, is_hot
):
    hot = {"greedy_reward": 0.36, "reward_mean": 0.05, "reward_std": 0.22, **changes}

    text = concluded("temperature_high", replace(demo()[0], **hot), batches=3, **settings)

    assert bool(text) == is_hot


def test_a_policy_that_has_caught_up_needs_no_other_temperature():
    hot = replace(demo()[0], greedy_reward=0.36, reward_mean=0.05, reward_std=0.22)
    rule = next(rule for rule in RULES if rule.name == "temperature_high")
    window = Window()
    for each in [hot] * 5 + [replace(hot, reward_mean=0.4)] * 5:
        window.add(each)

    assert rule.conclude(window, demo_settings(), False) is None


def test_no_more_actors_are_advised_than_a_run_can_have():
    evidence = replace(demo()[0], wait_s=0.9, span_s=1.0, store=StoreFigures(actors=4))

    text = concluded("learner_waits", evidence, fleet__max_actors=6)

    assert "no more than 6 can work, as fleet.max_actors 6" in text
    assert "no more" not in concluded(
        "learner_waits", replace(evidence, wait_s=0.3), fleet__max_actors=60
    )


def test_a_slow_actor_with_one_episode_at_a_time_is_not_told_to_have_fewer():
    evidence = replace(demo()[0], **two_actors({"s_per_token": 0.2}))

    assert "episodes at a time" in concluded("actor_slow", evidence)
    assert "or end it" in concluded("actor_slow", evidence, actors__max_concurrent_episodes=1)


def test_groups_that_are_dropped_in_bursts_are_no_fault_and_in_most_batches_are_one():
    in_bursts = broken(lambda e: {"dropped": {"stale": 16} if e.step % 12 == 0 else {}})
    in_every_third = broken(lambda e: {"dropped": {"stale": 2} if e.step % 3 == 0 else {}})

    burst, steady = (considered(demo_settings(), each)[-1] for each in (in_bursts, in_every_third))

    assert not any(each.rule == "groups_dropped" for each in burst)
    assert [each.rule for each in steady] == ["groups_dropped"]
    assert re.search(r"3\.4% .* in 14 of them", steady[0].text), steady[0].text


def test_a_text_names_a_setting_with_its_value():
    for case in CASES:
        batches = broken(case.fault, begin=case.begin)
        advice = considered(demo_settings(**case.settings), batches)[-1]
        named = re.findall(
            r"(?:run|algorithm|learner|actors|broker|buffer|rewards)\.\w+", advice[0].text
        )
        tables = demo_settings(**case.settings).model_dump()

        assert named, advice[0].text
        for name in named:
            table, _, key = name.partition(".")
            assert key in tables[table], name


def test_a_rule_needs_evidence_of_several_batches():
    bad = broken(lambda _: {"response_truncated_fraction": 1.0}, begin=0, batches=3)

    after = considered(demo_settings(), bad)

    assert [bool(each) for each in after] == [False, False, True]


def test_advice_does_not_flicker_about_a_threshold():
    cut = broken(lambda e: {"response_truncated_fraction": 0.55 if e.step % 20 < 10 else 0.42})

    after = considered(demo_settings(), cut)

    holds = [any(each.rule == "answers_cut_off" for each in advice) for advice in after]
    assert sum(now != before for before, now in pairwise(holds)) == 1
    assert holds[-1]


def test_two_good_batches_between_bad_ones_are_no_recovery():
    every_third = Rule("third", lambda w, _, __: None if w.newest.step % 3 else "bad", batches=1)
    advisor = Advisor(demo_settings(), [every_third])

    after = [advisor.consider(each) for each in demo()[:12]]

    assert [bool(each) for each in after] == [False] * 2 + [True] * 10


@pytest.mark.parametrize(
    ("ends", "of"),
    [
        ({"</a>": (250, 0.6), "": (6, 0.0)}, {"unread": 120}),  # as it should be
        ({"</a>": (120, 0.0), "": (136, 0.6)}, {"unread": 120, "reward": 0.5}),
        ({"</a>": (12, 0.0), "": (240, 0.6)}, {}),  # rare
        ({"</a>": (70, 0.5), "": (180, 0.6)}, {"blank": 70}),
    ],
)
def test_a_string_that_ends_complete_answers_is_no_fault(ends, of):
    settings = demo_settings(run__stop="[</a>]")

    after = considered(settings, broken(lambda e: {**ended(e, ends, **of), "reward_std": 0.4}))

    assert not any(each.rule == "stop_string_early" for advice in after for each in advice)


def test_a_pause_is_advised_before_the_first_batch_and_until_it_is_over():
    advisor = Advisor(demo_settings())
    paused = StoreFigures(paused="11 of the last 1000 tasks died")

    looks = [
        advisor.consider_store(each) for each in (StoreFigures(), paused, *[StoreFigures()] * 3)
    ]

    held = [[advice.rule for advice in each] for each in looks]
    assert held == [[], ["leasing_paused"], ["leasing_paused"], ["leasing_paused"], []]
    assert advisor.consider(demo()[0]) == ()


def test_a_pause_leaves_the_advice_about_batches_as_it_was():
    of_even = Rule("even", lambda w, _, __: None if w.newest.step % 2 else "bad", batches=1)
    advisor = Advisor(demo_settings(), [*RULES, of_even])
    before = [advisor.consider(each) for each in demo()[:3]][-1]

    after = [advisor.consider_store(StoreFigures(paused="11 died")) for _ in range(9)][-1]

    assert [each.rule for each in before] == ["even"], "of batch 2; 3 is one of three calm ones"
    assert [each.rule for each in after] == ["leasing_paused", "even"]


def test_few_failures_are_no_advice():
    few = broken(lambda e: store(e, data_failures=4 if e.step >= 25 else 0), begin=0, batches=30)

    assert considered(demo_settings(), [replace(e, episodes=8) for e in few])[-1] == ()


def test_advice_ends_when_the_fault_does():
    mended = [*broken(lambda _: {"response_truncated_fraction": 1.0}, batches=40), *demo()[40:60]]

    after = considered(demo_settings(), mended)

    assert any(a.rule == "answers_cut_off" for a in after[39])
    assert after[-1] == ()


def test_solved_questions_are_no_lack_of_variance():
    solved = broken(
        lambda e: {"zero_variance_groups": e.groups - 1, "reward_mean": 0.99, "entropy": 1e-3}
    )

    assert considered(demo_settings(), solved)[-1] == ()


def test_store_figures_of_a_store_that_lost_its_count_are_no_failure():
    rewound = broken(lambda e: store(e, data_failures=1000 if e.step < 40 else 0), begin=0)

    assert not any(
        a.rule == "reward_failing" for each in considered(demo_settings(), rewound) for a in each
    )
