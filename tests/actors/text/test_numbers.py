"""Numbers that texts state, and what reading any text of a policy costs."""

from __future__ import annotations

import contextlib
import random
import tempfile
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from actors.chat import read_prompt
from actors.engine.tokenizer import ANSWER, ModelTokenizer
from actors.environments.answer_worker import same_number
from actors.environments.dataset.programs import program_of, same_output
from actors.environments.dataset.scorers import SCORERS, make_scorer, score_of
from actors.environments.final_answer import candidates
from actors.numbers import read_number, stated_number
from actors.rewards.judge import read_score
from actors.tool_calls import read_calls
from configs.errors import SettingsError
from tests.actors.support.saved_tokenizer import CHATML, save_tokenizer

RIGHT = [
    ("#### 1,000", 1000), ("$5", 5), ("5.0", 5), ("-3", -3), ("50%", 50), ("1/2", 0.5),
    ("\u22123", -3), (r"\frac{1}{2}", 0.5), (r"-\dfrac{3}{4}", -0.75), (r"\frac12", 0.5),
    (r"1{,}000", 1000), (r"1\,000", 1000), ("1 000", 1000), ("2^{10}", 1024), ("2**3", 8),
    (r"3\times10^5", 300000), ("3 x 10^5", 300000), ("3 1/2", 3.5), (r"3\frac{1}{2}", 3.5),
    ("10 m^2", 10), ("5 km/h", 5), (r"5\text{ cm}", 5), (r"\$1{,}234", 1234), ("**7**", 7),
    (r"\boxed{$42$}", 42), ("18 dollars.", 18), ("3\n/ 4", 0.75), ("-1e3", -1000),
    ("So she has 15 apples.", 15), ("Mia has 8, gets 7, so 8 + 7 = 15 stickers.", 15),
    ("48/2 = <<48/2=24>>24\n#### 72", 72), ("2+40=42\n#### 42\nThat took 2 steps.", 42),
]  # fmt: skip
NONE = [
    "", "three", "10-3", "5-10", "(3,4)", "1:30", "5/2/2024", "1 or 2", "7,5", "1.000.000", "2x",
    "1,00,000", "3 million", "5!", "It is 5!", "5 squared", "2pi", r"2\pi", r"\sqrt{2}", "3\u00bd",
    "x^2", "x = 5 or x = 6", "3 * 4 = 12 or 13", "not 5", "in step 2", "1/0", "2^{99999}", "1e999",
    "3..5", "0x10", "5 6", "12/", "/12", "log 100", "COVID-19", "9" * 5000,
]  # fmt: skip


@pytest.mark.parametrize(("text", "value"), RIGHT)
def test_a_number_is_read_by_its_value(text: str, value: float) -> None:
    assert stated_number(text) == value
    assert score_of(f"So <answer>{text}</answer>", str(value), SCORERS["numeric"]) == 1.0
    assert score_of(f"So <answer>{text}</answer>", str(value + 1), SCORERS["numeric"]) == 0.0


@pytest.mark.parametrize("text", NONE)
def test_what_cannot_be_read_for_certain_is_unparsed(text: str) -> None:
    assert stated_number(text) is None
    for wanted in ("1", "2", "3", "5", "6", "10", "12", "13", "19", "30", "34", "2024", "-3", "0"):
        assert score_of(f"<answer>{text}</answer>", wanted, SCORERS["numeric"]) in (None, 0.0)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (r"\frac{1}{2}", "2"), (r"1{,}234", "234"), ("2^{10}", "10"), (r"3\times10^5", "5"),
        ("3 1/2", "0.5"), ("10 m^2", "2"), ("\u22123", "3"),
        ("3=4", "4"), ("0.5%", "0.05"),
    ],
)  # fmt: skip
def test_a_part_of_a_number_is_not_the_number(text: str, wanted: str) -> None:
    assert score_of(f"<answer>{text}</answer>", wanted, SCORERS["numeric"]) in (None, 0.0)


@pytest.mark.parametrize(
    ("scorer", "text", "reference", "score"),
    [
        ("choice", r"<answer>\boxed{B}</answer>", "B", 1.0),
        ("choice", r"\boxed{\text{B}}", "B", 1.0),
        ("choice", "B. because\nThe answer is C", "B", 0.0),
        ("exact", r"<answer>\boxed{Paris}</answer>", "Paris", 1.0),
        ("exact", "<answer>**Paris**</answer>", "Paris", 1.0),
        ("numeric", "It is 5.\nNo: the answer is 6.", "5", 0.0),
        ("numeric", "<answer>50%</answer>", "0.5", 1.0),
    ],
)
def test_an_answer_counts_by_its_value_and_only_one_answer_counts(
    scorer: str, text: str, reference: str, score: float
) -> None:
    assert score_of(text, reference, SCORERS[scorer]) == score


@pytest.mark.parametrize(
    ("reply", "most", "score"),
    [
        ("7", 10, 7), ("I would say 4.5", 10, 4.5), ("Score: 3/10", 10, 3), ("**2**/10", 10, 2),
        ("I give it 3 out of 10.", 10, 3), ("Rating: [[4]] on a scale from 1 to 10", 10, 4),
        ("Score: 0/10", 10, 0), ("Quality 2/5", 5, 2), ("Score: 35/100", 100, 35),
        ("Score: 3. Two of its 9 claims are right.", 10, 3), ("Of 3 claims 1 is wrong.\n6", 10, 6),
    ],
)  # fmt: skip
def test_a_judges_score_is_read_in_the_forms_that_judges_write(
    reply: str, most: float, score: float
) -> None:
    assert read_score(reply, most) == score


@pytest.mark.parametrize(
    "reply", ["Step 1 is right. Step 2 is wrong, and in step", "7,5", "-3", "35/100", "4/5", "7%"]
)
def test_a_judges_reply_that_is_not_certain_has_no_score(reply: str) -> None:
    with pytest.raises(ValueError, match="number from 0 to 10"):
        read_score(reply, 10.0)


def test_of_a_judges_reply_that_was_cut_off_only_a_named_score_counts() -> None:
    assert read_score("Score: 7. It says", 10.0, is_cut=True) == 7
    with pytest.raises(ValueError, match="number from 0 to 10"):
        read_score("It says 7", 10.0, is_cut=True)


PIECES = [
    " ", "\n", "\t", "<tool_call>", "</tool_call>", "<answer>", "</think>", "\\boxed{", "{", "}",
    "```", "```json\n", "the answer is ", "answer", ":", "*", "**", "1", "1,000", "9", "/", "^",
    "=", "####", "\n#### 7", "$", "\\frac{", "\\times", "score: ", "[[", "]]", "out of 10",
    "<|im_end|>", "<|im_", ANSWER,
    "\ud83d", "\u22123", "-", "+", ".", "x", "[", '"',
]  # fmt: skip


def _read_score(text: str) -> None:
    with contextlib.suppress(ValueError):
        read_score(text, 10.0)


@cache
def _tokenizer() -> ModelTokenizer:
    with tempfile.TemporaryDirectory() as folder:
        return ModelTokenizer(save_tokenizer(folder, template=CHATML))


READERS: dict[str, Callable[[str], object]] = {
    "calls": read_calls,
    "candidates": candidates,
    "prompt": read_prompt,
    "control tokens": lambda text: _tokenizer()._marked(text),
    "same number": lambda text: same_number("7", text),
    "program": program_of,
    "output": lambda text: same_output(text.encode(errors="replace"), text + " 1.5"),
    "number": read_number,
    "stated": stated_number,
    "judge": _read_score,
    "exact": lambda text: score_of(text, "x", SCORERS["exact"]),
    "numeric": lambda text: score_of(text, "7", SCORERS["numeric"]),
    "choice": lambda text: score_of(text, "B", SCORERS["choice"]),
    "regex": lambda text: score_of(text, "[01]+", SCORERS["regex"]),
    "json_schema": lambda text: score_of(text, {"type": "array"}, SCORERS["json_schema"]),
}
SMALLEST, LARGEST = 1 << 14, 1 << 20
MEASURABLE_S = 0.05  # below it two costs are not compared


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_twice_the_text_costs_at_most_twice_the_work(name: str) -> None:
    READERS[name]("y")  # what is made once is no cost of a text
    random_pieces = random.Random(7)
    begun = [("", "".join(random_pieces.choices(PIECES, k=40))) for _ in range(3)]
    begun += [
        ("", piece) for piece in ("```", "<tool_call>", "answer: ", "{", "1,000", "####", "*")
    ]
    begun += [("<tool_call>", "\n"), ("the answer is x", " "), ("```", "\n"), ("0.", "1")]
    for head, piece in begun:
        size, last = SMALLEST, 0.0
        while size <= LARGEST:  # from small to large: what grows too fast ends early
            text = head + piece * (size // len(piece)) + "y"
            cost = min(_cost(READERS[name], text) for _ in range(1 if last < MEASURABLE_S else 3))
            grown = last >= MEASURABLE_S and cost > 2.3 * last
            assert not grown, (head, piece, size, last, cost)
            assert cost < 1.0, (head, piece, size, cost)
            size, last = 4 * size if cost < MEASURABLE_S / 4 else 2 * size, cost


def test_tokens_of_an_observation_do_not_cost_the_square_of_its_length() -> None:
    text = "".join(random.Random(7).choices(PIECES, k=2000)) + "<|im_end|> " * 500
    _tokenizer().encode_observation("y")
    short, long = (
        min(_cost(_tokenizer().encode_observation, read_prompt(text * times)) for _ in range(3))
        for times in (4, 32)
    )

    assert long < 24 * short, (short, long)  # eight times the text: 8 if linear, 64 if quadratic


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("regex", r"(\s|\S\S?)+z"), ("json_schema", {"pattern": r"(\s|\S\S?)+z"}),
        ("math-verify", "7"), ("code", [{"input": "", "output": "7"}]),
    ],
)  # fmt: skip
def test_what_is_compared_apart_costs_the_actor_no_time(name: str, reference: object) -> None:
    if name == "math-verify":
        pytest.importorskip("math_verify", reason="in the extra `math`")
    try:
        scorer = make_scorer(name, time_s=1, memory_mb=512)
    except SettingsError as error:
        pytest.skip(str(error))
    pieces = "".join(random.Random(7).choices(PIECES, k=40))
    for size in (SMALLEST, LARGEST):
        text = pieces * (size // len(pieces))
        for answer in (
            text,
            f"<answer>{text}</answer>",
            f"```\n{text}\n```",
            '"' + "a" * size + '"',
        ):
            scores = []
            cost = _cost(lambda said: scores.append(scorer(said, reference)), answer)  # noqa: B023 - called here

            assert scores[0] in (None, 0.0)
            assert cost < 1.0, (size, answer[:20], cost)


def _cost(read: Callable[[Any], object], text: object) -> float:
    begin = time.thread_time()
    read(text)
    return time.thread_time() - begin
