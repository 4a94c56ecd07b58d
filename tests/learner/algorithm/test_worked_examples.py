"""The worked examples of docs/losses.md, run as they are printed, beside their formulas."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from configs.settings import AlgorithmSettings
from learner.algorithm.advantages import BatchRewards
from learner.algorithm.catalogue import describe
from learner.algorithm.microbatch import Segments
from learner.algorithm.surrogates import Terms
from learner.algorithm.user_losses import load_user_losses
from tests.newcomer.pages import blocks_of

PAGE = "docs/losses.md"
LENGTHS = (3, 1, 2)
ADVANTAGES = (1.0, -0.5, -2.0)
LOG_RATIOS = (0.3, -0.1, 0.05, -0.4, 0.6, -0.2)
EPISODES = torch.arange(3).repeat_interleave(torch.tensor(LENGTHS))


@pytest.fixture
def page(tmp_path: Path) -> dict[str, tuple[AlgorithmSettings, Any]]:
    """Write the page's files, and load each function as the settings beside it name it."""
    blocks = blocks_of(PAGE)
    for block in blocks:
        if block.language == "python":
            assert block.file is not None
            (tmp_path / block.file).write_text(block.text)
    loaded: dict[str, tuple[AlgorithmSettings, Any]] = {}
    for block in blocks:
        if block.language == "yaml":
            chosen = yaml.safe_load(block.text)["algorithm"]
            named = {
                key: f"{tmp_path}/{value}" if ".py:" in str(value) else value
                for key, value in chosen.items()
            }
            settings = AlgorithmSettings.model_validate(named)
            for kind, function in load_user_losses(settings, max_policy_lag=2).items():
                loaded[kind] = settings, function
    assert loaded.keys() == {"surrogate", "advantage", "correction"}
    return loaded


def test_each_has_the_sections_that_nyala_losses_shows(
    page: dict[str, tuple[AlgorithmSettings, Any]],
) -> None:
    for kind, (settings, function) in page.items():
        entry = describe(f"algorithm.{kind}", getattr(settings, kind), function)
        assert entry.formula and entry.use and "arXiv:" in entry.source


def test_vespo_has_the_gradient_of_its_formula(
    page: dict[str, tuple[AlgorithmSettings, Any]],
) -> None:
    settings, vespo = page["surrogate"]
    log_ratios_N = torch.tensor(LOG_RATIOS, dtype=torch.float64).requires_grad_()
    advantages_N = torch.tensor(ADVANTAGES).double()[EPISODES]
    zeros_N = torch.zeros(6)
    terms = Terms(log_ratios_N, advantages_N, zeros_N, zeros_N, Segments(EPISODES, 3), math.inf)

    objective = vespo(terms, settings)

    (gradient_N,) = torch.autograd.grad(objective.values_N.sum(), log_ratios_N)
    expected = []
    for begin, length, advantage in zip((0, 3, 4), LENGTHS, ADVANTAGES, strict=True):
        w = math.exp(sum(LOG_RATIOS[begin : begin + length]))
        k, scale = (2, 3) if advantage > 0 else (3, 2)
        expected += [w**k * math.exp(scale * (1 - w)) * advantage] * length
    assert gradient_N.tolist() == pytest.approx(expected, rel=1e-6)
    low_N, high_N = objective.outside()
    assert low_N.tolist() == [False, False, False, True, False, False], "the bad one with w < 1"
    assert high_N.tolist() == [True, True, True, False, False, False], "w = 1.49 is below 3 / 2"


def test_maxrl_averages_over_right_answers(
    page: dict[str, tuple[AlgorithmSettings, Any]],
) -> None:
    settings, maxrl = page["advantage"]
    rewards = np.array([1.0, 0, 0, 0, 1, 1, 0, 0, 0])
    outcomes = BatchRewards(rewards, np.ones(9), np.array([0, 0, 0, 0, 1, 1, 1, 2, 2]))

    advantages_E = maxrl(outcomes, settings)

    # 1/successes for each right answer, less the mean of the group's score functions, times n.
    expected = [4 - 1, -1, -1, -1, 3 / 2 - 1, 3 / 2 - 1, -1, 0, 0]
    assert advantages_E.tolist() == pytest.approx(expected)


def test_trust_region_masking_leaves_out_whole_episodes(
    page: dict[str, tuple[AlgorithmSettings, Any]],
) -> None:
    settings, trm = page["correction"]
    log_rhos_N = torch.tensor(LOG_RATIOS)

    corrected = trm(log_rhos_N, Segments(EPISODES, 3), settings)

    assert settings.parameters == {"bound": 0.5}
    assert corrected.keep_N.tolist() == [True] * 4 + [False] * 2
    assert corrected.log_ratios_N.equal(log_rhos_N)
