"""Adapters on a card: trained in bfloat16, and merged with the bits that actors compute."""

from __future__ import annotations

import pytest
import torch

from broker.weights.low_rank import add_low_rank, round_by_place
from learner.model.lora import AdaptedLinear
from learner.model.ranks import Ranks
from learner.weights.gather import whole_of
from tests.gpu.support.training_on_cards import SMALL, Load, Training, settings_of

pytestmark = pytest.mark.gpu
LOAD = Load(episodes=16, prompt=64, completion=192, microbatch_tokens=1024)


def test_adapters_lower_the_loss_and_are_merged_as_on_a_cpu(card: Ranks) -> None:
    table = {"lora_rank": 8, "lora_alpha": 20.0}
    training = Training(card, SMALL, LOAD, settings_of(LOAD, table, "bfloat16"))

    losses = [training.step(number) for number in range(1, 11)]

    assert losses[-1] < losses[0]
    found = 0
    for module in training.policy.modules():
        if isinstance(module, AdaptedLinear):
            parts = module.weight, module.lora_b, module.lora_a
            weight, b, a = (whole_of(part.detach(), torch.float32).cpu().clone() for part in parts)
            add_low_rank(weight, b, a, scale=module.scale)
            merged = whole_of(module.merged(torch.float32), torch.float32)
            assert torch.equal(merged.cpu(), weight)
            rows, columns = (torch.arange(size, dtype=torch.int32) for size in weight.shape)
            round_by_place(weight.view(torch.int32), rows, columns)
            merged = whole_of(module.merged(torch.bfloat16), torch.bfloat16)
            assert torch.equal(merged.cpu().float(), weight)
            found += 1
    assert found == 4 * 7
