"""The runs of a sweep: combinations, names, and what is refused."""

import pytest
from pydantic import TypeAdapter

from configs.errors import SettingsError
from configs.settings import RunSettings
from console.sweep.grid import MAX_RUNS, grid, parse_axis


def names(*texts, base="mine"):
    return [point.name for point in grid([parse_axis(text) for text in texts], base=base)]


def test_all_combinations_are_made_the_last_setting_changing_fastest():
    points = grid([parse_axis("learner.lr=1e-6,3e-6"), parse_axis("run.seed=1, 2")], base="mine")

    assert [point.name for point in points] == [
        "mine-lr_1e-6-seed_1",
        "mine-lr_1e-6-seed_2",
        "mine-lr_3e-6-seed_1",
        "mine-lr_3e-6-seed_2",
    ]
    assert points[1].overrides == ["learner.lr=1e-6", "run.seed=2"]


def test_a_name_depends_on_its_own_values_alone():
    assert set(names("learner.lr=1e-6,3e-6")) < set(names("learner.lr=3e-6,1e-5,1e-6"))
    assert names("learner.threads=1", "actors.threads=1") == [
        "mine-learner.threads_1-actors.threads_1"
    ]


@pytest.mark.parametrize(
    "values",
    ["a/b,a_b,a+b", ",".join(f"{'very-' * 20}long-{i}" for i in range(3)), '"a,b","a, b",x'],
)
def test_names_are_allowed_and_no_two_runs_have_the_same(values):
    found = names(f"run.environment={values}")

    assert len({*found}) == 3
    for name in found:
        assert TypeAdapter(RunSettings).validate_python({"model": "m", "name": name}).name == name


@pytest.mark.parametrize(
    "text", ["", "learner.lr", "lr=1,2", "learner.lr=", "learner.lr=1,,2", "learner.lr=1,1"]
)
def test_what_is_no_setting_with_values_is_refused(text):
    with pytest.raises(SettingsError, match="--over must be a setting and its values"):
        parse_axis(text)


def test_a_setting_that_is_there_twice_and_too_many_runs_are_refused():
    with pytest.raises(SettingsError, match="each once"):
        names("learner.lr=1", "learner.lr=2")
    values = ",".join(map(str, range(17)))
    with pytest.raises(SettingsError, match=f"at most {MAX_RUNS} runs, got 289"):
        names(f"run.seed={values}", f"learner.threads={values}")
