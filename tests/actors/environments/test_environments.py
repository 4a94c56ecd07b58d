"""Environments: the same item everywhere, held-out questions apart, and scorers kept in hand."""

from __future__ import annotations

import importlib.util
import json
import math
import random
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from actors.environments.base import Environment, columns_of, is_held_out, item_on_side
from actors.environments.calculator import ArithmeticSyntaxError, Calculator, evaluate
from actors.environments.final_answer import position_share
from actors.environments.reasoning_gym import (
    STYLES,
    ReasoningGym,
    compact_style,
    dataset_names,
    import_dataset,
    is_formula,
)
from actors.environments.registry import OURS, call_within, check_environment, make_environment
from configs.errors import DeadlineError, SettingsError
from configs.settings import RunSettings

LETTERS: dict[str, Any] = {
    "dataset": "spell_backward",
    "prompt_style": "compact",
    "min_word_len": 3,
    "max_word_len": 5,
}


def make(environment: str = "reasoning_gym", **settings: Any) -> Environment:
    return make_environment(
        RunSettings(model="init", environment=environment, environment_settings=settings)
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(STYLES))
def test_the_reference_answer_of_a_compact_item_is_exact(name):
    environment = make(dataset=name, prompt_style="compact")

    for index in range(10):
        conversation = environment.begin(index, 0, held_out=index % 2 == 0)
        assert conversation.answer is not None
        assert conversation.demonstration == ((conversation.answer, True),)
        assert conversation.step(conversation.answer).done
        score = conversation.score()
        assert (score.parts["exact"], score.reward) == (1.0, 1.0), conversation.prompt


def test_compact_prompts_look_as_documented():
    items = {
        "spell_backward": ({"word": "aBc"}, "abc>"),
        "number_sorting": (
            {"original_numbers": ["3.0", "1.5"], "direction": "descending"},
            "3,1.5>",
        ),
        "base_conversion": (
            {"source_repr": "101", "source_base": 2, "target_base": 10},
            "101:2>10:",
        ),
    }
    for name, (metadata, prompt) in items.items():
        assert compact_style(name).prompt({"metadata": metadata}) == prompt


def _words_of(text):
    """Words of a compact list, and whether they are to ascend."""
    return text[:-1].split(","), text[-1] == "<"


def _rotated(text, by):
    return "".join(chr((ord(c) - 65 + by) % 26 + 65) if c.isalpha() else c for c in text)


def _same_number(text, answer):
    return math.isclose(float(answer), eval(text.removesuffix("=")))


def _converted(text, answer):
    number, _, bases = text[:-1].partition(":")
    source, _, target = bases.partition(">")
    return int(answer, int(target)) == int(number, int(source))


def _sorted_by(text, answer, key):
    words, ascending = _words_of(text)
    return answer.split(",") == sorted(words, key=key, reverse=not ascending)


def _counted(text, answer):
    letter, _, rest = text.partition(" ")
    return int(answer) == rest.lower().count(letter)


SOLVED = {
    "spell_backward": lambda text, answer: answer == text[-2::-1],
    "number_sorting": lambda text, answer: _sorted_by(text, answer, float),
    "word_sorting": lambda text, answer: _sorted_by(text, answer, str),
    "base_conversion": _converted,
    "caesar_cipher": lambda text, answer: answer in [_rotated(text[:-1], n) for n in range(26)],
    "count_bits": lambda text, answer: int(answer) == int(text[:-1]).bit_count(),
    "gcd": lambda text, answer: int(answer) == math.gcd(*map(int, text[:-1].split(","))),
    "lcm": lambda text, answer: int(answer) == math.lcm(*map(int, text[:-1].split(","))),
    "letter_counting": _counted,
    "chain_sum": _same_number,
    "basic_arithmetic": _same_number,
    "products": _same_number,
}
"""For each compact style: whether an answer follows from the prompt alone."""


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(STYLES))
def test_a_compact_prompt_holds_all_that_its_answer_depends_on(name):
    environment = make(dataset=name, prompt_style="compact")

    for index in range(30):
        conversation = environment.begin(index, 0, held_out=False)
        assert SOLVED[name](conversation.prompt, conversation.answer), conversation.prompt


NEED_MORE = {
    "codeio": "zss",
    "game_of_life": "cellpylib",
    "game_of_life_halting": "cellpylib",
    "zebra_puzzles": "pycosat",
}
"""Datasets of reasoning-gym, and what they need that no lock has."""


@pytest.mark.parametrize(("name", "package"), NEED_MORE.items())
def test_a_dataset_asks_for_the_package_that_it_alone_needs(name, package):
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed here")

    with pytest.raises(
        SettingsError, match=rf"got {name}, which needs {package}[=>].*uv pip install"
    ):
        import_dataset(name)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of foreign datasets: files left open, escapes
def test_every_dataset_asks_its_whole_question_and_the_same_one_again():
    names = set(dataset_names()) - NEED_MORE.keys()
    assert len(names) > 100
    for name in names:
        settings: dict[str, Any] = {"dataset": name, "size": 8}
        conversations = []
        for process in range(2):
            random.seed(process)  # which other code of a process draws from too
            conversations.append(make(**settings).begin(0, 0, held_out=False))
        here, there = conversations

        assert str(here.prompt).startswith(str(columns_of(here)["question"]).rstrip()), name
        assert there.prompt == here.prompt, name
        assert_every_format_counts_alike(here, name)
        if name not in STYLES:
            with pytest.raises(SettingsError, match=f"prompt_style must be full for {name}, got"):
                compact_style(name)


def assert_every_format_counts_alike(conversation, name):
    """The right answer scores what it scores bare, however it is said."""
    answer = conversation.answer
    thought = "<think>Is it <answer>no</answer>?\nLet me see.</think>\n\n"
    forms = [
        f"First 3, then 4.\nSo <answer>{answer}</answer> it is.",
        f"{thought}<answer>\n{answer}\n</answer>",
        f"{thought}{answer}",
        f"Some reasoning.\n\n\\boxed{{{answer}}}",
    ]
    if "\n" not in answer.strip():
        forms += [f"Some reasoning.\n{answer}"]
        forms += [f"Some reasoning.\n{said} {answer}." for said in ("The answer is", "**Answer:**")]
    scores = {form: score_of(conversation, form) for form in forms}
    assert min(scores.values()) >= score_of(conversation, answer), (name, answer, scores)


def score_of(conversation, text):
    conversation.step(text)
    return conversation.score().reward


@pytest.mark.parametrize(
    "text", ["<think>It is {}", "<think>{}</think>no", "<answer>{}</answer> or <answer>0</answer>"]
)
def test_an_answer_that_was_not_given_last_does_not_count(text):
    conversation = make(dataset="chain_sum").begin(0, 0, held_out=False)

    assert score_of(conversation, text.format(conversation.answer)) < 0.1


def test_a_full_question_tells_how_to_answer():
    told = make(dataset="chain_sum").begin(0, 0, held_out=False)
    bare = make(dataset="chain_sum", answer_format="").begin(0, 0, held_out=False)

    assert told.prompt == f"{bare.prompt}\n\nPut your final answer between <answer> and </answer>."


ELSEWHERE = """
import json
from actors.environments.registry import call_within
from actors.environments.reasoning_gym import dataset_names, import_dataset
from actors.environments.registry import check_environment, make_environment
from configs.errors import DeadlineError
from configs.settings import RunSettings

def run(settings):
    return RunSettings(model="init", environment_settings=settings)

environment = make_environment(run({"dataset": "spell_backward"}))
prompts = [environment.begin(i, 1, held_out=i % 2 == 0).prompt for i in range(20)]
endless = run({"dataset": "base_conversion", "min_base": 7, "max_base": 7})
try:
    call_within(1.0, lambda: check_environment(endless), what="run.environment")
except DeadlineError as error:
    print(json.dumps([prompts, str(error)]))
"""


@pytest.fixture(scope="module")
def elsewhere() -> tuple[list[str], str]:
    """Prompts, and the error of endless settings, in a process of its own.

    One process for both, since each costs its imports; and the thread that an endless
    generator leaves behind would slow all later tests.
    """
    command = [sys.executable, "-W", "ignore", "-c", ELSEWHERE]
    ran = subprocess.run(command, capture_output=True, timeout=120, check=True)
    prompts, error = json.loads(ran.stdout)
    return prompts, error


@pytest.mark.slow
def test_an_item_is_its_index_in_every_process(elsewhere):
    here = make(dataset="spell_backward")

    for seed in (0, 1):  # members of a group differ in their seeds alone
        prompts = [here.begin(i, seed, held_out=i % 2 == 0).prompt for i in range(20)]
        assert prompts == elsewhere[0]


@pytest.mark.slow
def test_settings_that_never_end_are_noticed_and_do_not_keep_the_process(elsewhere):
    assert elsewhere[1].startswith("run.environment must end within 1 s, got no result")


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("reasoning_gym", LETTERS),
        ("reasoning_gym", {**LETTERS, "prompt_style": "full"}),
        ("reasoning_gym", {"dataset": "count_bits", "min_n": 1, "max_n": 60}),
        ("calculator", {"max_operand": 4}),
    ],
)
def test_training_never_sees_a_held_out_question(name, settings):
    environment = make(name, **settings)

    training = {str(environment.begin(i, 0, held_out=False).prompt).casefold() for i in range(2000)}
    held_out = {str(environment.begin(i, 0, held_out=True).prompt).casefold() for i in range(300)}

    assert held_out
    assert not training & held_out


def test_a_space_too_small_to_split_is_refused():
    with pytest.raises(SettingsError, match="must leave some held-out questions, got none among"):
        item_on_side(
            0, lambda number: "always the same", str, held_out=not is_held_out("always the same")
        )


def test_a_tenth_of_questions_is_held_out():
    share = sum(is_held_out(f"question {i}") for i in range(5000)) / 5000

    assert 0.08 < share < 0.12


def test_dense_reward_gives_credit_by_position():
    conversation = make(**LETTERS, dense=True).begin(0, 0, held_out=False)
    assert conversation.answer is not None

    conversation.step(conversation.answer[:-1] + "?")
    score = conversation.score()

    share = 1 - 1 / len(conversation.answer)
    assert score.reward == pytest.approx(share / 2)
    assert score.parts["exact"] == 0
    assert score.parts["position"] == pytest.approx(share)


@pytest.mark.parametrize(
    ("text", "answer", "share"),
    [("cba", "cba", 1), ("", "cba", 0), ("cbaa", "cba", 0.75), ("cb", "cba", 2 / 3), ("", "", 1)],
)
def test_position_share(text, answer, share):
    assert position_share(text, answer) == pytest.approx(share)


def test_a_scorer_that_raises_gives_zero_and_is_counted(monkeypatch):
    conversation = make(dataset="prime_factorization", prompt_style="full").begin(
        0, 0, held_out=False
    )

    conversation.step("two times three")
    score = conversation.score()

    assert (score.reward, score.parts["exact"]) == (0.0, 0.0)

    def broken(self, answer, entry):
        raise ZeroDivisionError

    from reasoning_gym.algorithmic.spell_backward import SpellBackwardDataset

    monkeypatch.setattr(SpellBackwardDataset, "score_answer", broken)
    conversation = make(**LETTERS).begin(0, 0, held_out=False)
    conversation.step("x")
    assert conversation.score().metrics == {"scorer_errors": 1.0}
    assert conversation.score().reward == 0.0


@pytest.mark.parametrize(
    "name",
    ["string_insertion", "spiral_matrix", "binary_matrix", "n_queens", "countdown", "puzzle24"],
)
def test_no_answer_is_run_as_a_program(name, tmp_path):
    target = tmp_path / "made"
    conversation = make(dataset=name, prompt_style="full").begin(0, 0, held_out=False)

    for program in (f"open({str(target)!r}, 'w')", f"[open({str(target)!r}, 'w')]"):
        conversation.step(f"<answer>{program}</answer>")
        assert conversation.score().parts["exact"] == 0.0

    assert not target.exists()


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("3*(4 + 5) - 7/2", True), ("x**2*sin(x) + C", True), ("-2.5*exp(x)", True),
        ("exec(chr(97))", False), ("x.real", False), ("x.__class__", False), ("'a'", False),
        ("[1]", False), ("1" * 1001, False), ("\uff45val(1)", False), ("open", False),
    ],
)  # fmt: skip
def test_a_formula_has_no_names_but_those_of_mathematics(text, is_one):
    assert is_formula(text) is is_one


def test_a_formula_that_is_never_done_with_costs_its_answer_and_no_time_of_the_actor():
    conversation = make(dataset="countdown", prompt_style="full").begin(0, 0, held_out=False)
    conversation.step(f"<answer>{conversation.answer}</answer>")
    assert conversation.score().parts["exact"] == 1.0

    begin = time.thread_time()
    conversation.step("<answer>9**9**9**9**9</answer>")
    score = conversation.score()

    assert (score.reward, score.metrics) == (0.0, {"scorer_errors": 1.0})
    assert time.thread_time() - begin < 0.5


def test_an_answer_in_tags_is_found():
    conversation = make(**(LETTERS | {"prompt_style": "full"})).begin(0, 0, held_out=False)

    conversation.step(f"I think it is <answer> {conversation.answer} </answer>, surely.")

    assert conversation.score().parts["exact"] == 1.0


def test_a_call_within_its_deadline_returns_or_raises():
    assert call_within(5.0, lambda: 7, what="a sum") == 7
    with pytest.raises(ZeroDivisionError):
        call_within(5.0, lambda: 1 // 0, what="a division")
    end = threading.Event()
    with pytest.raises(DeadlineError, match=r"a nap must end within 0\.05 s"):
        call_within(0.05, end.wait, what="a nap")
    end.set()


def test_a_run_that_repeats_itself_needs_an_environment_that_does(monkeypatch):
    run = RunSettings(model="init", environment="calculator")
    monkeypatch.setattr(Calculator, "can_replay", False, raising=False)
    check_environment(run)

    with pytest.raises(SettingsError, match="got calculator, whose can_replay is False"):
        check_environment(run.model_copy(update={"deterministic": True}))


def test_check_makes_an_item_of_both_sides():
    assert check_environment(RunSettings(model="init", environment="calculator")).answer


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("reasoning_gym", {"dataset": "spel_backward"}, "did you mean spell_backward"),
        ("reasoning_gym", {"dataset": 3}, r"dataset must be valid .*got 3"),
        ("reasoning_gym", {**LETTERS, "max_word_len": 1}, "max_word_len must be >= min_word_len"),
        ("reasoning_gym", {"dataset": "composite", "datasets": [{}]}, "no attribute 'name'"),
        ("reasoning_gym", {"no_such_key": 1}, "unexpected keyword argument 'no_such_key'"),
        (
            "reasoning_gym",
            {"dataset": "prime_factorization", "prompt_style": "compact"},
            "prompt_style must be full for prime",
        ),
        ("reasoning_gym", {"prompt_style": "terse"}, "'full' or 'compact'"),
        ("calculator", {"no_such_key": 1}, "no_such_key must be valid"),
        ("calculator", {"max_operand": 0}, "greater than or equal to 2"),
        (
            "chess",
            {},
            f"must be one of {', '.join(sorted(OURS))}, or path/.*got 'chess'",
        ),
        ("json:JSONEncoder", {}, "must be a class with begin and describe, or reset and step"),
        ("json:no_such", {}, "must be a class of json, .*it has .*"),
        ("no_such_module:Chess", {}, "must be in an importable module, got .*No module named"),
    ],
)
def test_wrong_settings_are_refused_with_the_fix(name, settings, words):
    with pytest.raises(SettingsError, match=f"(?s)run.environment.*{words}"):
        make(name, **settings)


def test_an_environment_of_the_user_is_found_by_module_and_class():
    environment = make("actors.environments.reasoning_gym:ReasoningGym", **LETTERS)

    assert isinstance(environment, ReasoningGym)
    assert "spell_backward" in environment.describe()


def test_the_calculator_is_called_and_answers():
    conversation = make("calculator").begin(3, 0, held_out=False)
    call, observation, answer = conversation.demonstration

    step = conversation.step(call.text)
    assert (step.observation, step.done) == (observation.text, False)
    assert conversation.step(answer.text).done

    assert conversation.score().parts == {"exact": 1.0, "used_tool": 1.0}


def test_the_calculator_takes_an_answer_without_a_call_and_survives_nonsense():
    conversation = make("calculator").begin(3, 0, held_out=False)
    assert conversation.step(conversation.answer or "").done
    assert conversation.score().parts == {"exact": 1.0, "used_tool": 0.0}

    conversation = make("calculator", dense=True).begin(3, 0, held_out=False)
    assert conversation.step("[__import__('os')]").observation == "?;"
    assert conversation.step("[1+1]").done
    assert conversation.score().reward < 0.5

    assert make("calculator").begin(3, 0, held_out=False).score().reward == 0.0


@pytest.mark.parametrize(
    ("text", "value"),
    [("7+8*3", 31), ("-(2-5)*4", 12), ("2--3", 5), ("0*9-1", -1), ("((7))", 7)],
)
def test_arithmetic_is_evaluated(text, value):
    assert evaluate(text) == value


@pytest.mark.parametrize(
    "text", ["", "+", "1+", "(1", "1)", "2**3", "1/2", "a", "1 + 1", "٣", "9" * 13, "1+" * 40 + "1"]
)
def test_what_is_no_arithmetic_is_refused(text):
    with pytest.raises(ArithmeticSyntaxError):
        evaluate(text)


@pytest.mark.parametrize("size", [1000, 1_000_000])
def test_neighbouring_indexes_find_different_held_out_items(size: int) -> None:
    found = [
        item_on_side(n, lambda n: n % size, str, held_out=True) for n in range(size // 100)[:256]
    ]

    distinct = len(set(found))
    assert distinct >= 0.9 * len(found)


def test_the_setting_names_every_environment_of_ours():
    text = RunSettings.model_fields["environment"].description or ""

    assert [name for name in OURS if f"`{name}`" not in text] == []
