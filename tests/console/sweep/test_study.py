"""A search: ranges, values that get better, and a study that another session goes on with."""

import math

import pytest

from configs.errors import SettingsError
from console.sweep.grid import parse_axis
from console.sweep.study import Study, range_of

AXES = [parse_axis("learner.lr=1e-7..1e-3"), parse_axis("run.seed=1,2")]


def open_study(folder, trials, axes=AXES):
    return Study(folder, axes, base="r", trials=trials, jobs=1)


def score(point):
    """Highest at 3e-5, and with seed 2."""
    distance = math.log10(float(point.values["learner.lr"]) / 3e-5)
    return -(distance**2) - (point.values["run.seed"] == "1")


@pytest.mark.slow
def test_later_values_are_better_and_lie_in_the_range(tmp_path):
    study = open_study(tmp_path, 40)

    scores = []
    for point in study.points():
        assert 1e-7 <= float(point.values["learner.lr"]) <= 1e-3
        scores.append(score(point))
        study.tell(point.name, scores[-1])

    assert len(scores) == 40
    assert sum(scores[-15:]) > sum(scores[:15])


def test_a_session_goes_on_with_what_was_interrupted_then_with_new_values(tmp_path):
    first = open_study(tmp_path, 3)
    points = first.points()
    done, begun = next(points), next(points)
    first.tell(done.name, 1.0)

    second = open_study(tmp_path, 4)
    found = []
    for point in second.points():
        found.append(point)
        second.tell(point.name, None)

    assert found[0] == begun
    assert len(found) == 3
    assert len({point.name for point in [done, *found]}) == 4
    assert [point.name for point in second.made()] == [done.name, *(p.name for p in found)]
    assert list(open_study(tmp_path, 4).points()) == []


def test_whole_numbers_stay_whole(tmp_path):
    study = open_study(tmp_path, 8, [parse_axis("run.group_size=2..64")])

    values = []
    for point in study.points():
        values.append(int(point.values["run.group_size"]))
        study.tell(point.name, 0.0)

    assert all(2 <= value <= 64 for value in values)
    assert len({*values}) > 3


@pytest.mark.parametrize("text", ["learner.lr=1e-4..1e-7", "learner.lr=a..b", "learner.lr=1..1"])
def test_what_is_no_range_is_refused(text):
    with pytest.raises(SettingsError, match="must be two numbers, the smaller one first"):
        range_of(parse_axis(text))


def test_a_list_is_no_range():
    assert range_of(parse_axis("learner.lr=1e-6,3e-6")) is None
    assert range_of(parse_axis("run.model=a")) is None
