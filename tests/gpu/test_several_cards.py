"""Two cards over NCCL against one: FSDP, HSDP and Ulysses, with parameters in host memory too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.learner.support.ranks.several_ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def test_two_cards_train_as_one_does(tmp_path: Path) -> None:
    run_ranks(tmp_path, ("two_cards", 1), ("two_cards", 2))

    [alone] = torch.load(tmp_path / "1.pt")
    for case in torch.load(tmp_path / "2.pt"):
        for ours, theirs in zip(case, alone, strict=True):
            assert float((ours - theirs).abs().max()) < 2e-4, "two steps of 1e-4"
