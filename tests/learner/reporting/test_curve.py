"""Curves in bounded memory, and as characters."""

import pytest

from learner.reporting.run_snapshot import MAX_POINTS, DownsampledSeries, sparkline


def curve_of(values):
    curve = DownsampledSeries()
    for value in values:
        curve.add(value)
    return curve


@pytest.mark.parametrize("size", [1, MAX_POINTS, MAX_POINTS + 1, MAX_POINTS + 2, 5000, 12_345])
def test_a_curve_is_the_means_of_equal_stretches_of_all_values(size):
    values = [float(at % 97) for at in range(size)]

    points = curve_of(values).points

    assert 0 < len(points) <= MAX_POINTS + 1
    stride = 1
    while stride * MAX_POINTS < size:
        stride *= 2
    for at, point in enumerate(points[:-1]):
        stretch = values[at * stride : (at + 1) * stride]
        assert point == pytest.approx(sum(stretch) / stride)
    last = values[(len(points) - 1) * stride :]
    assert points[-1] == pytest.approx(sum(last) / len(last), abs=97 / 2)


def test_a_sparkline_goes_from_the_lowest_to_the_highest_value():
    assert sparkline([1.0, 2.0, 3.0, 2.0], 10) == "▁▅█▅"
    assert sparkline([1.0, 2.0, 3.0, 2.0], 10, ascii_only=True) == "_=#="


def test_a_sparkline_averages_what_it_has_no_room_for():
    assert sparkline([0.0, 0.0, 2.0, 2.0, 1.0, 1.0], 3) == sparkline([0.0, 2.0, 1.0], 3)


def test_a_constant_and_nothing_at_all_can_be_drawn():
    assert sparkline([0.5, 0.5], 10) == "▁▁"
    assert (sparkline([], 10), sparkline([1.0], 0)) == ("", "")
