"""Tables of Markdown, and texts of other people in them."""

from __future__ import annotations

import pytest

from configs.markdown import block, code, literal, table


def test_a_table_has_a_line_for_its_head_and_for_each_row():
    assert table(("a", "b"), [("1", "2")]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"


@pytest.mark.parametrize(
    ("cell", "shown"),
    [
        ("a | b", "a \\| b"),
        ("two\nlines", "two lines"),
        (code("a | b"), "`a \\| b`"),
        ("**markup** stays", "**markup** stays"),
    ],
)
def test_no_cell_breaks_its_table(cell: str, shown: str):
    assert table(("head",), [(cell,)]).splitlines()[2:] == [f"| {shown} |"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("<b>&</b>", "&lt;b&gt;&amp;&lt;/b&gt;"),
        ("*a* | _b_", "\\*a\\* \\| \\_b\\_"),
        ("a\\b", "a\\\\b"),
        ("two\nlines", "two <br> lines"),
    ],
)
def test_a_text_of_a_model_is_shown_as_it_is(text: str, shown: str):
    assert table(("head",), [(text,)], cell=literal).splitlines()[2] == f"| {shown} |"


def test_code_between_words_has_its_bars_bare():
    assert code("a | `b`\nc") == "`a | 'b' c`"


def test_a_block_is_fenced_with_more_backticks_than_it_has():
    assert block("```\nx\n```").splitlines()[0] == "````text"
