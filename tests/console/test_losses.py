"""`nyala losses`: the names of the mathematics, for people, programs and the docs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from configs.errors import SettingsError
from console.verbs.reference_lists import losses_as_markdown, show_losses
from learner.algorithm.catalogue import entries
from learner.algorithm.methods import METHODS

DOCS = Path(__file__).parents[2] / "docs" / "algorithms.md"


def test_the_list_has_every_name_and_every_method(capsys):
    show_losses(None, as_json=False, as_markdown=False)

    shown = capsys.readouterr().out
    for name in [entry.name for entry in entries()] + [method.name for method in METHODS]:
        assert re.search(rf"^  {re.escape(name)} ", shown, re.MULTILINE), name


def test_one_name_is_shown_with_formula_paper_and_defaults(capsys):
    show_losses("TIS", as_json=False, as_markdown=False)

    shown = capsys.readouterr().out
    assert "algorithm.rho_bar = 2.0" in shown
    assert "arXiv:1802.01561" in shown
    assert "dr_grpo" not in shown


def test_json_has_the_same(capsys):
    show_losses(None, as_json=True, as_markdown=False)

    shown = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in shown["choices"]] == [entry.name for entry in entries()]
    assert [row["name"] for row in shown["methods"]] == [method.name for method in METHODS]


def test_a_name_that_does_not_exist_is_refused_with_a_hint():
    with pytest.raises(SettingsError, match=r"got 'tsi'; did you mean tis"):
        show_losses("tsi", as_json=False, as_markdown=False)


def test_the_docs_have_the_tables_that_markdown_prints():
    """`nyala losses --markdown` prints the tables of docs/algorithms.md."""
    assert losses_as_markdown().strip() in DOCS.read_text(encoding="utf-8")
