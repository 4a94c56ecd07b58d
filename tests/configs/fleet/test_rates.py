"""Hours of fleets in the model of rates; `./run test-long wanted-actors` plays a hundred seeds."""

import pytest

from tests.configs.support.fleet.hours import TRACES, compared


@pytest.mark.parametrize("trace", TRACES)
def test_an_hour_costs_little_more_than_one_with_foresight(trace):
    result = compared(trace, range(12))

    assert result.holds, result
    assert result.settled > 0.5, result
    assert result.batches > 0.95, result
