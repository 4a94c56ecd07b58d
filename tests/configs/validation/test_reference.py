"""Refused uses of the KL to a reference policy."""

from typing import Any

import pytest

from configs.settings import Settings


def settings(**algorithm: Any) -> Settings:
    return Settings.model_validate({"run": {"model": "m"}, "algorithm": algorithm})


@pytest.mark.parametrize(
    ("algorithm", "text"),
    [
        ({"kl_target": 0.1}, r"kl_coefficient must be > 0 with algorithm\.kl_target, got 0"),
        (
            {"kl_coefficient": 0.1, "kl_in": "reward", "kl_estimator": "k1"},
            r"advantage must be reinforce_pp, gae or vtrace .* got grpo",
        ),
        (
            {"kl_coefficient": 0.1, "kl_in": "reward", "advantage": "reinforce_pp"},
            r"kl_estimator must be k1 with algorithm\.kl_in = reward, got k3",
        ),
        (
            {
                "kl_coefficient": 0.1,
                "kl_in": "reward",
                "kl_estimator": "k1",
                "advantage": "reinforce_pp",
                "whiten": "group",
            },
            r"whiten must be none or batch with algorithm\.kl_in = reward, got group",
        ),
    ],
)
def test_a_kl_that_would_be_lost_or_wrong_is_refused(algorithm: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        settings(**algorithm)


def test_a_kl_that_is_off_is_asked_nothing() -> None:
    settings(kl_in="reward")
    settings(kl_coefficient=0.1)
    settings(
        kl_coefficient=0.1, kl_in="reward", kl_estimator="k1", advantage="reinforce_pp", kl_target=1
    )
