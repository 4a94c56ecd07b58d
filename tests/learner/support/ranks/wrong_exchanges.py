"""Exchanges between ranks that are wrong, each with the layout in which it must be found."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from learner.model import sequence_parallel, tensor_parallel
from learner.model.logits import VocabularyPart
from learner.model.sequence_parallel import SequenceSplit
from learner.model.tensor_parallel import TensorGroup


def _heads_permuted() -> AbstractContextManager[Any]:
    right = SequenceSplit.by_tokens
    return patch.object(SequenceSplit, "by_tokens", lambda self, x: right(self, x).flip(2))


def _heads_of_keys_and_values_repeated_in_turn() -> AbstractContextManager[Any]:
    def in_turn(x: Tensor, times: int, dim: int) -> Tensor:
        assert dim == 0
        return torch.cat([x] * times)

    return patch.object(Tensor, "repeat_interleave", in_turn)


def _gradient_averaged() -> AbstractContextManager[Any]:
    right = FSDPModule.set_gradient_divide_factor
    return patch.object(FSDPModule, "set_gradient_divide_factor", lambda self, _: right(self, 2.0))


def _every_rank_follows_all_scores() -> AbstractContextManager[Any]:
    """The gradient of a token comes back from each rank that computed the loss."""

    class Wrong(sequence_parallel._Gather):
        @staticmethod
        def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
            (gradient_N,) = grad_outputs
            return gradient_N.split(list(ctx.counts))[ctx.rank] * len(ctx.counts), None, None

    return patch.object(sequence_parallel, "_Gather", Wrong)


def _tokens_of_a_neighbour_scored() -> AbstractContextManager[Any]:
    right = SequenceSplit.own_scores
    return patch.object(SequenceSplit, "own_scores", lambda self, x: right(self, x).roll(1))


def _norms_of_heads_not_added_up() -> AbstractContextManager[Any]:
    return patch.object(tensor_parallel, "ADDED_UP", "")


def _states_of_one_part_alone() -> AbstractContextManager[Any]:
    """The gradient of the states that enter attention and the inner layer is not added up."""
    return patch.object(TensorGroup, "enter", lambda _, x: x)


def _every_part_has_the_chosen_token() -> AbstractContextManager[Any]:
    right = VocabularyPart.places

    def wrong(self: VocabularyPart, targets_C: Tensor, size: int) -> tuple[Tensor, Tensor]:
        places_C, is_here_C = right(self, targets_C, size)
        assert is_here_C is not None
        return places_C, torch.ones_like(is_here_C)

    return patch.object(VocabularyPart, "places", wrong)


WRONG: dict[str, tuple[int, str, Callable[[], AbstractContextManager[Any]]]] = {
    "heads permuted": (2, "sequence", _heads_permuted),
    "gradient averaged over copies": (2, "copies", _gradient_averaged),
    "gradient averaged over a sequence": (2, "sequence", _gradient_averaged),
    "gradient counted on each rank": (
        2,
        "sequence, scores in two passes",
        _every_rank_follows_all_scores,
    ),
    "gradient of heads' norms not added up": (2, "tensor", _norms_of_heads_not_added_up),
    "gradient of states not added up": (2, "tensor", _states_of_one_part_alone),
    "chosen token in every part": (4, "tensor x shard", _every_part_has_the_chosen_token),
    "other tokens scored": (2, "sequence", _tokens_of_a_neighbour_scored),
    "heads of keys and values repeated in turn": (
        4,
        "keys and values on two ranks each",
        _heads_of_keys_and_values_repeated_in_turn,
    ),
}
