"""Agents only notice a pause when an actor, the broker, Redis, the learner or a connection dies."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.support.dying_parts import DEATHS, DyingParts


@pytest.mark.live
def test_conversations_outlive_a_death_of_each_part(tmp_path: Path) -> None:
    parts = DyingParts(tmp_path, seed=1)

    talks = parts.play()  # which checks them

    assert set(parts.deaths) == set(DEATHS)
    assert sum(len(talk.turns) for talk in talks.values()) > 2 * len(talks)
