"""vLLM's answers to a learner's probes: right weights, then two layers exchanged."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from actors.engine.threaded import ThreadedEngine
from actors.weights.probe import LogprobDifference
from buffer.record.episode import PolicyVersion
from learner.model.policy import Policy
from tests.actors.support.tiny_model import stage
from tests.weights.support.right_engines import judged, varied_probe

NUM_PROBES = 8


async def only_right_weights_pass(
    engine: ThreadedEngine, model: PreTrainedModel, policy: Policy, folder: Path
) -> list[str]:
    """Assert it; what was shown of right weights.

    Args:
        engine: Started, in bfloat16.
        model: Of any weights of this shape.
        policy: The learner's, of the same weights.
        folder: For staged weights.
    """
    expected = [varied_probe(policy, number, torch.bfloat16) for number in range(NUM_PROBES)]

    async def shown(number: int, weights: Any) -> list[LogprobDifference]:
        version = PolicyVersion(1, number)
        await engine.apply(stage(weights, folder / f"{number}", version, dtype="bfloat16"))
        return [
            LogprobDifference.from_logprobs(await engine.probe(probe.token_ids), probe.logprobs)
            for probe in expected
        ]

    right = judged(await shown(1, model), expected, "bfloat16")
    wrong_model: Any = copy.deepcopy(model)
    layers = wrong_model.base_model.layers
    layers[0], layers[-1] = layers[-1], layers[0]
    wrong = judged(await shown(2, wrong_model), expected, "bfloat16")
    again = judged(await shown(3, model), expected, "bfloat16")
    none, every = f"0 of {NUM_PROBES}", f"{NUM_PROBES} of {NUM_PROBES}"
    assert (right[0], wrong[0], again[0]) == (none, every, none), (right, wrong, again)
    return right
