"""Tokens that corrections keep, and products too large for a float."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from configs.settings import AlgorithmSettings
from learner.algorithm.corrections import CORRECTIONS, Corrected
from learner.algorithm.microbatch import Segments

# Three episodes; each mask below drops the second one, or a token of it, and nothing else.
LOG_RHOS = torch.tensor([0.1, -0.2, 0.0, -3.0, 0.05, 0.2], dtype=torch.float64)
SEGMENTS = Segments(torch.tensor([0, 0, 1, 1, 1, 2]), num_episodes=3)
WHOLE_EPISODE = [True, True, False, False, False, True]
ONE_TOKEN = [True, True, True, False, True, True]
BOUNDS = {"mask_low": 0.5, "mask_high": 2.0, "geo_low": 0.8, "geo_high": 1.3, "veto": 0.1}


def _correct(name: str, log_rhos: torch.Tensor, segments: Segments, **bounds: Any) -> Corrected:
    settings = AlgorithmSettings.model_validate({**BOUNDS, **bounds})
    return CORRECTIONS[name](log_rhos, segments, settings)


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("mis", ONE_TOKEN),
        ("icepop", ONE_TOKEN),
        ("seq_mis", WHOLE_EPISODE),
        ("geo_mask", WHOLE_EPISODE),
        ("token_veto", WHOLE_EPISODE),
        ("tis", [True] * 6),
        ("seq_tis", [True] * 6),
        ("geo_tis", [True] * 6),
        ("none", [True] * 6),
    ],
)
def test_a_mask_leaves_out_the_tokens_or_episodes_out_of_bounds(
    name: str, kept: list[bool]
) -> None:
    assert _correct(name, LOG_RHOS, SEGMENTS).keep_N.tolist() == kept


@pytest.mark.parametrize("name", ["mis", "seq_mis", "geo_mask"])
def test_a_mask_is_two_sided(name: str) -> None:
    assert _correct(name, -LOG_RHOS, SEGMENTS).keep_N.tolist() == (
        ONE_TOKEN if name == "mis" else WHOLE_EPISODE
    )


@pytest.mark.parametrize("name", sorted(CORRECTIONS))
def test_a_product_beyond_any_float_stays_finite_where_it_is_kept(name: str) -> None:
    """Two thousand tokens of ratio e: the product has 869 digits."""
    log_rhos = torch.ones(2000, requires_grad=True)
    segments = Segments(torch.zeros(2000, dtype=torch.int64), num_episodes=1)

    corrected = _correct(name, log_rhos, segments)
    ratios = torch.where(corrected.keep_N, corrected.log_ratios_N, 0.0).exp()
    ratios.sum().backward()

    assert ratios.isfinite().all()
    assert log_rhos.grad is not None and log_rhos.grad.isfinite().all()


def test_an_episode_without_a_token_changes_no_other() -> None:
    gap = Segments(torch.tensor([0, 0, 3, 3, 3, 4]), num_episodes=5)

    for name in CORRECTIONS:
        ours, theirs = (_correct(name, LOG_RHOS, segments) for segments in (SEGMENTS, gap))
        assert torch.equal(ours.log_ratios_N, theirs.log_ratios_N)
        assert torch.equal(ours.keep_N, theirs.keep_N)
