"""One of the runs that cannot learn (`sabotage.py` has all): the first advice names the cause."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.support.sabotages import SABOTAGES, advised

SHORT = ("run.steps=10", "learner.checkpoint_every=10", "learner.warm_start_steps=100")
"""A model that has learned less raises more often, and a run is advised from its first batches."""


@pytest.mark.live
def test_a_reward_that_raises_is_named_with_its_line(tmp_path: Path) -> None:
    sabotage = next(each for each in SABOTAGES if each.name == "reward raises")

    found = advised(tmp_path, *sabotage.prepare(tmp_path), *SHORT)

    assert found.first.most_common(1)[0][0] == sabotage.rule
    assert sabotage.named in found.texts[sabotage.rule]
