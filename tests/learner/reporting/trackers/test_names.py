"""Names of figures in trackers: every key has one, and values that are no figures are left out."""

from learner.reporting.figures import FIGURES
from learner.reporting.trackers.names import NAMES, batch_figures, evaluation_figures

NO_FIGURES = {"step", "time", "actors_wanted_why"}
"""Keys that are drawn over, or texts."""


def test_every_key_of_a_batch_has_one_name_in_a_group() -> None:
    assert set(NAMES) | NO_FIGURES == {figure.key for figure in FIGURES}
    assert len(set(NAMES.values())) == len(NAMES)
    assert [name for name in NAMES.values() if name.count("/") != 1] == ["environments"]


def test_figures_are_named_by_group_and_nested_ones_have_a_part_more() -> None:
    line: dict[str, object] = {
        "step": 3,
        "loss": 0.25,
        "reward_mean": 1,
        "is_replay": True,
        "mfu": None,
        "grad_norm": float("nan"),
        "reward_parts": {"exact": 0.5},
        "environments": {"spell": {"reward_mean": 0.5}},
        "episodes_by_actor": {"actor-1": 4, "actor-2": 4},
        "alerts": [],
    }

    assert batch_figures(line) == {
        "train/loss": 0.25,
        "reward/mean": 1.0,
        "progress/is_replay": 1.0,
        "reward/parts/exact": 0.5,
        "environments/spell/reward_mean": 0.5,
        "actors/sampling": 2.0,
        "health/alerts": 0.0,
    }


def test_a_part_that_an_actor_names_cannot_leave_its_group() -> None:
    names = batch_figures({"reward_parts": {"../a b": 1.0, "..": 2.0, "x" * 300: 3.0}})

    assert list(names)[:2] == ["reward/parts/_a_b", "reward/parts/_"]
    assert max(map(len, names)) < 250


def test_evaluations_are_a_group_of_their_own() -> None:
    line = {"step": 3, "accuracy": 0.5, "sampled": {"pass@4": 0.75}, "versions": [[1, 3]]}

    assert evaluation_figures(line) == {"eval/accuracy": 0.5, "eval/sampled/pass_4": 0.75}
