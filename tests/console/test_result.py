"""The table of a finished run."""

from __future__ import annotations

import io

from rich.console import Console

from console.display.progress import advice_in
from console.display.result import print_result, rows_of
from console.run.run_folder import RunFolder


def test_what_did_not_happen_is_left_out_and_what_is_not_known_is_a_dash():
    rows = rows_of({"rollbacks": 0, "tasks_dead": 0, "held_out_accuracy_after": None})

    assert rows == {"  dead": "0", "held-out accuracy after": "-"}


def test_what_was_evaluated_is_shown_by_environment_and_for_sampled_answers():
    rows = rows_of(
        {
            "held_out_accuracy_by_environment": {"sums": 0.5, "words": None},
            "held_out_sampled": {"avg@2": 0.25, "pass@1": 0.25},
        }
    )

    assert rows == {
        "  by environment": "sums 0.500",
        "  of sampled answers": "avg@2 0.250, pass@1 0.250",
    }


def test_what_happened_is_counted_with_its_reasons():
    rows = rows_of(
        {"rollbacks": 2, "tasks_dropped_by_reason": {"stale": 1600, "zero_variance": 3}, "new": [1]}
    )

    assert rows == {"rollbacks": "2", "    by reason": "stale 1,600, zero_variance 3", "new": "[1]"}


def test_advice_is_not_a_row_but_a_sentence_of_its_own():
    given = [{"rule": "groups_flat", "text": "raise it"}, "odd", {"rule": "no text"}]
    summary = {"advice": given, "rollbacks": 1}

    assert advice_in(summary) == {"groups_flat": "raise it"}
    assert rows_of(summary) == {"rollbacks": "1"}
    assert advice_in({}) == {}


def test_the_end_of_a_run_with_adapters_names_their_folder_and_how_to_export_others(tmp_path):
    folder = RunFolder(tmp_path / "r")
    (folder.path / "adapter").mkdir(parents=True)
    folder.summary.write_text("{}")
    out = io.StringIO()

    print_result(Console(file=out, width=80), folder)

    (line,) = [each for each in out.getvalue().splitlines() if "--lora-modules" in each]
    assert line.startswith(f"{folder.path}/adapter  ")
    assert line.endswith(f"nyala checkpoint export {folder.path} --adapter --to FOLDER")
