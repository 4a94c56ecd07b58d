"""`benchmarks.delivery.load`: what a small load gives, and which way a ratio points."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.delivery.load import Size, load, ratios


@pytest.mark.slow
def test_a_light_load_on_two_brokers_is_answered_and_nobody_is_suspected() -> None:
    said: list[str] = []

    arm = load(Size(rates=(100,), fleets=(4,), beats_s=0.5, episodes_s=2.0), 2, said.append)

    [beats], [episodes] = arm["beats"], arm["episodes"]
    assert beats["per_s"] > 0
    assert beats["busy"] == beats["suspect"] == 0
    assert episodes["episodes_per_s"] > 0
    assert episodes["submit"]["p50_ms"] <= episodes["submit"]["p99_ms"]
    assert episodes["lost"] == episodes["suspect"] == 0
    assert len(said) == 2


def test_ratios_of_the_load_are_larger_where_it_is_borne_better() -> None:
    def arm(*rates: float) -> dict[str, Any]:
        steps = [{"per_s": rate, "episodes_per_s": rate} for rate in rates]
        return {"beats": steps, "episodes": steps}

    assert ratios({"one": arm(100, 200, 150), "two": arm(100, 300)}) == {
        "two_over_one_beats": 1.5,
        "two_over_one_episodes": 1.5,
        "overload_over_best_episodes": 0.75,
    }
