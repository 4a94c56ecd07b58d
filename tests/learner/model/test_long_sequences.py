"""Attention within long sequences: made in blocks, equal to that at once, in linear memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from buffer.record.episode import Episode
from learner.model import attention
from learner.model.policy import Policy
from tests.learner.support.exact_gradients import (
    EXACT,
    FAMILIES,
    ROUNDED,
    Found,
    assert_equal,
    make_model,
    packed,
    train,
)
from tests.learner.support.made_episodes import make_episode
from tests.learner.support.padded import PaddedPolicy

AT_ONCE = 40
TOGETHER = 1000  # tokens of a microbatch


def _episodes(length: int, *, shared: bool) -> list[Episode]:
    random = np.random.default_rng(5)
    prompts = [[5, 6, 7], [5, 6, 7]] if shared else [[5, 6, 7], [7, 6, 5, 4]]
    return [
        make_episode(
            task_id,
            group_id=0,
            prompt=prompt,
            completion=random.integers(3, 48, size=length + task_id).tolist(),
            logprobs=random.uniform(-4, -2, size=length + task_id).tolist(),
            reward=float(task_id),
        )
        for task_id, prompt in enumerate(prompts)
    ]


def _trained(family: str, dtype: torch.dtype, episodes: list[Episode]) -> Found:
    policy = Policy(make_model(family, dtype), temperature=1.0)
    return train(policy, packed(episodes, TOGETHER))


@pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_give_what_attention_at_once_gives(
    family: str, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    episodes = _episodes(21, shared=shared)
    alone = train(PaddedPolicy(make_model(family, torch.float64)), packed(episodes, 1))

    monkeypatch.setattr(attention, "WEIGHTS_AT_ONCE", AT_ONCE)

    assert_equal(_trained(family, torch.float64, episodes), alone, EXACT)
    assert_equal(_trained(family, torch.float32, episodes), alone, ROUNDED)


class Largest(TorchDispatchMode):
    """Notes the largest tensor that anything makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(made) if isinstance(x, Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return made


@pytest.mark.parametrize(
    ("family", "shared"), [("qwen3", True), ("gemma3_text", False), ("gemma2", False)]
)
def test_no_tensor_is_quadratic_in_a_long_sequence(
    family: str, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "WEIGHTS_AT_ONCE", 2**12)
    largest = {}

    for length in (256, 512):
        with Largest() as found:
            _trained(family, torch.float32, _episodes(length, shared=shared))
        largest[length] = found.elements

    assert largest[512] < 2.2 * largest[256], "a mask of all would be four times as large"


def test_of_a_long_sequence_only_what_blocks_begin_with_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = {}
    for at_once in (2**12, 2**24):
        monkeypatch.setattr(attention, "WEIGHTS_AT_ONCE", at_once)
        storages: dict[int, int] = {}
        q = torch.randn(1, 2, 512, 8, requires_grad=True)

        def note(tensor: Tensor, storages: dict[int, int] = storages) -> Tensor:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            out = attention._attend_run(q, q, q, None, scale=1.0, cap=5.0)
        kept[at_once] = sum(storages.values())
        assert out.requires_grad

    assert kept[2**12] <= 4 * q.nbytes
    assert kept[2**24] > 4 * 512 * 512, "the weights of a sequence that is short enough are kept"
