"""Scorers of final answers by name."""

from __future__ import annotations

from typing import Any

import pytest

from actors.environments.dataset.scorers import SCORERS, score_of

ADULT = {"type": "object", "required": ["age"], "properties": {"age": {"minimum": 18}}}


@pytest.mark.parametrize(
    ("scorer", "reference", "text", "score"),
    [
        ("exact", "New York", "<answer> new  york. </answer>", 1.0),
        ("exact", "New York", "<answer>York</answer>", 0.0),
        ("exact", "New York", "", None),
        ("numeric", "#### 1,234", "So it is \\boxed{1234.0}", 1.0),
        ("numeric", "$18", "3 a day for 6 days.\nThe answer is 18 dollars.", 1.0),
        ("numeric", 0.5, "<answer>1/2</answer>", 1.0),
        ("numeric", "0.333333", "<answer>1/3</answer>", 1.0),
        ("numeric", "0.33", "<answer>1/3</answer>", 0.0),
        ("numeric", "-3", "<answer>3</answer>", 0.0),
        ("numeric", "3\n/ 4", "<answer>0.75</answer>", 1.0),
        ("numeric", "1e3", "<answer>1000</answer>", 1.0),
        ("numeric", "3", "<answer>1/0</answer>", None),
        ("numeric", "3", "three", None),
        ("choice", "B", "I think so. The answer is (b).", 1.0),
        ("choice", "B) Paris", "<answer>B. Paris, of course</answer>", 1.0),
        ("choice", "B", "<answer>C</answer>", 0.0),
        ("choice", "B", "A dog would say B or C", None),
        ("regex", r"[01]+", "<answer>0110</answer>", 1.0),
        ("regex", r"[01]+", "<answer>0112</answer>", 0.0),
        ("json_schema", ADULT, '<think>{}</think>```json\n{"age": 20}\n```', 1.0),
        ("json_schema", '{"type": "array"}', "[1, 2]", 1.0),
        ("json_schema", ADULT, '{"age": 7}', 0.0),
        ("json_schema", ADULT, "{age: 20}", None),
        ("numeric", "7", "<think>it may be 7", None),
    ],
)
def test_a_completion_is_compared_with_its_reference(
    scorer: str, reference: Any, text: str, score: float | None
) -> None:
    assert score_of(text, reference, SCORERS[scorer]) == score


@pytest.mark.parametrize(
    ("scorer", "reference"),
    [("numeric", "many"), ("choice", "Paris"), ("regex", "("), ("json_schema", "{")],
)
def test_a_reference_that_no_answer_can_match_is_refused(scorer: str, reference: str) -> None:
    with pytest.raises(ValueError, match=r"must (have|be) a"):
        SCORERS[scorer]("anything", reference)
