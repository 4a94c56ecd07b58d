"""The model of rates, by which the number of actors is judged, beside the simulator."""

import pytest

from tests.configs.support.fleet.rates import Hour
from tests.simulation.fleets.compared import MOST_APART, MOST_HOURS_APART, Difference, difference


@pytest.mark.slow
@pytest.mark.parametrize("name", ["begins with too many"])
def test_rates_and_simulator_differ_by_little(name: str) -> None:
    found = difference(name)

    assert found.holds, found


def test_more_than_little_does_not_hold() -> None:
    hour = Hour([4], actor_hours=2.0, idle_s=30.0, settled_s=1000.0)
    other = Hour([4], actor_hours=2.0, idle_s=30.0, settled_s=1000.0)

    assert Difference("same", 4.0, hour, other).holds
    other.idle_s += 1000.0 * MOST_APART + 1
    assert not Difference("more idle", 4.0, hour, other).holds
    other.idle_s, other.actor_hours = 30.0, 2.0 / (1 + MOST_HOURS_APART) - 0.01
    assert not Difference("fewer hours", 4.0, hour, other).holds
