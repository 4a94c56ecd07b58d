"""A flat reward explains itself: twelve runs that cannot learn, and one that can.

Run beside CI, `pytest tests/system/sabotage.py`: each is a whole run with the small engine.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.support.sabotages import SABOTAGES, Sabotage, advised

OF_THE_MACHINE = {"learner_waits", "actors_wait", "actor_slow", "groups_dropped"}
"""Rules that may hold of a tiny run on a busy machine."""


@pytest.mark.parametrize("sabotage", SABOTAGES, ids=lambda each: each.name.replace(" ", "-"))
def test_the_first_advice_names_the_cause(sabotage: Sabotage, tmp_path: Path) -> None:
    found = advised(tmp_path, *sabotage.prepare(tmp_path))

    print(sabotage.name, found.first, found.texts)
    assert found.first.most_common(1)[0][0] == sabotage.rule
    assert sabotage.named in found.texts[sabotage.rule]
    if sabotage.rule == "leasing_paused":
        assert "leasing is paused: " in found.status, found.status
        assert sabotage.named in found.status


def test_a_run_without_a_fault_gets_no_advice_about_rewards_answers_or_training(
    tmp_path: Path,
) -> None:
    found = advised(tmp_path)

    assert found.texts.keys() <= OF_THE_MACHINE, found.texts
