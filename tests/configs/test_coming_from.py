"""`docs/coming-from.md`: each name of another project is answered with the setting of its row."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.error_text import owner_of

PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"


def rows() -> list[list[str]]:
    """The cells of the table: our setting, then TRL's, verl's and prime-rl's."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_names_of_others_lead_to_the_setting_of_their_row(row: list[str]) -> None:
    setting, *others = row
    names = [name for name in others if name != "-"]

    assert names
    for name in names:
        is_the_same = name.rpartition(".")[2] == setting.rpartition(".")[2]
        assert is_the_same or owner_of(name) == setting, name
