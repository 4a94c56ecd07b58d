"""Exit codes of errors, by which `nyala up` decides about restarts."""

import pytest

from configs import errors


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.SettingsError, 2),
        (errors.RefusedError, 2),
        (errors.RewardError, 2),
        (errors.CheckpointError, 2),
        (errors.LostLineage, 3),
        (errors.StoreError, 1),
        (errors.DeadlineError, 1),
        (errors.EngineError, 1),
        (errors.EngineUnfit, 2),
        (errors.EngineDied, 4),
        (errors.EngineNotStarted, 5),
        (errors.WeightsError, 1),
        (errors.NyalaError, 1),
    ],
)
def test_a_process_is_started_again_only_if_that_may_help(kind, code):
    assert errors.exit_code(kind("why")) == code


def test_every_error_is_in_the_tree_at_the_top_of_the_module():
    kinds = [
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.NyalaError)
    ]

    assert len(kinds) > 5
    for name in kinds:
        assert name in errors.__doc__
