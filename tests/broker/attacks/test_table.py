"""The table of attacks: which ring holds, and one attack to see that it is played."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from tests.broker.attacks import __main__ as table
from tests.broker.attacks.kinds import ATTACKS

HELD = table.Row(
    name="x", before_kib=1000, after_kib=1050, lease_s=1, batches=1, dead=0, lost=2, granted=2
)


@pytest.mark.parametrize(
    "worse",
    [{"after_kib": 1051}, {"lease_s": 1.1}, {"batches": 0}, {"dead": 1}, {"lost": 3}],
    ids=str,
)
def test_a_ring_holds_only_within_every_bound(worse: dict[str, Any]) -> None:
    assert HELD.holds
    assert not replace(HELD, **worse).holds


@pytest.mark.slow
def test_an_attack_is_played_against_a_ring_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "SETTLE_S", 1.0)

    row = asyncio.run(table.suffer("failures", ATTACKS["failures"], 1.0))

    assert row.granted > 0
    assert row.batches > 0
    assert row.dead == 0
