"""Packed sequences: as each alone, and as padded rows, in loss and in every gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, MambaConfig

from buffer.record.episode import Episode
from configs.errors import SettingsError
from learner.algorithm.microbatch import Microbatch, Sequences
from learner.model import attention, policy
from learner.model.attention import check_packing
from learner.model.policy import Policy
from learner.model.sequence_parallel import SequenceSplit
from tests.learner.support.exact_gradients import (
    EXACT,
    FAMILIES,
    PRECISIONS,
    Found,
    assert_equal,
    make_model,
    packed,
    train,
)
from tests.learner.support.made_episodes import make_episode, num_tokens
from tests.learner.support.padded import PaddedPolicy
from tests.learner.support.random_models import make_random_model
from tests.learner.support.varlen import varlen_by_its_documentation


def _episodes() -> list[Episode]:
    """Groups of four, of several lengths, some of them equal and most longer than the windows."""
    random = np.random.default_rng(3)
    lengths = [2, 9, 9, 5, 12, 1, 7, 7]
    return [
        make_episode(
            task_id,
            group_id=task_id // 4,
            prompt=random.integers(3, 48, size=3 + task_id // 4).tolist(),
            completion=random.integers(3, 48, size=length).tolist(),
            logprobs=random.uniform(-4, -2, size=length).tolist(),
            mask=[1, *random.integers(0, 2, size=length - 1).tolist()],
            reward=float(random.uniform()),
        )
        for task_id, length in enumerate(lengths)
    ]


def _microbatches(microbatch_tokens: int) -> list[Microbatch]:
    return packed(_episodes(), microbatch_tokens)


def _reference(family: str, dtype: torch.dtype) -> Found:
    return train(PaddedPolicy(make_model(family, dtype)), _microbatches(1000))


def _packed(family: str, dtype: torch.dtype, microbatch_tokens: int = 1000) -> Found:
    scorer = Policy(make_model(family, dtype), temperature=1.0)
    return train(scorer, _microbatches(microbatch_tokens))


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_padded_equals_each_episode_alone(
    family: str, dtype: torch.dtype, tolerance: float
) -> None:
    padded = _reference(family, dtype)

    for microbatch_tokens in (1000, 30, 1):
        assert_equal(_packed(family, dtype, microbatch_tokens), padded, tolerance)

    assert len(_microbatches(1)) == len(_episodes()) > len(_microbatches(30)) > 1
    assert all(float(gradient.abs().max()) > 0 for gradient in padded[1])


def _each_sequence(
    change: Callable[[Sequences], Sequences],
) -> Callable[[pytest.MonkeyPatch], None]:
    """A wrong variant of what a forward pass is given."""

    def seed(monkeypatch: pytest.MonkeyPatch) -> None:
        right = attention.run_trunk
        monkeypatch.setattr(policy, "run_trunk", lambda trunk, s, cut: right(trunk, change(s), cut))

    return seed


def _each_layer(**changes: Any) -> Callable[[pytest.MonkeyPatch], None]:
    """A wrong variant of what a layer's attention is given."""

    def seed(monkeypatch: pytest.MonkeyPatch) -> None:
        right = attention.attend
        wrong = lambda *args, **kwargs: right(*args, **kwargs | changes)  # noqa: E731 - one line
        monkeypatch.setitem(AttentionInterface._global_mapping, attention.PACKED, wrong)

    return seed


def _mask_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    right = attention._mask
    monkeypatch.setattr(
        attention, "_mask", lambda n, s, window, device: right(n, s, window and window + 1, device)
    )


def _later_token_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def mask(length: int, seen: int, _window: int | None, _device: torch.device) -> Tensor:
        return torch.ones(length, seen, dtype=torch.bool).tril(1)

    monkeypatch.setattr(attention, "_mask", mask)


def _heads_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    right = attention._attend_plainly
    monkeypatch.setattr(
        attention,
        "_attend_plainly",
        lambda q, k, v, m, **how: right(q, k.flip(1), v.flip(1), m, **how),
    )


def _own_state_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    def states(trunk: Any, sequences: Sequences, cut: SequenceSplit) -> Tensor:
        return attention.run_trunk(trunk, sequences, cut).index_select(0, cut.states_M + 1)

    monkeypatch.setattr(policy, "states_before", states)


def _gradient_averaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each microbatch by its own number of tokens, then the average of them all."""
    right = _microbatches

    def averaged(microbatch_tokens: int) -> list[Microbatch]:
        all_of_them = right(microbatch_tokens)
        return [
            replace(
                m, weights_N=torch.full_like(m.weights_N, 1 / len(m.weights_N)) / len(all_of_them)
            )
            for m in all_of_them
        ]

    monkeypatch.setitem(globals(), "_microbatches", averaged)


def _reset_late(sequences: Sequences) -> Sequences:
    """The first token of a sequence counts on from the one before it.

    One that shifts whole sequences would not show: rotary embeddings see distances alone.
    """
    positions_T = sequences.positions_T.clone()
    first = sequences.bounds[1:-1].long()
    positions_T[first] = positions_T[first - 1] + 1
    return replace(sequences, positions_T=positions_T)


def _neighbour_seen(sequences: Sequences) -> Sequences:
    joined = sum(sequences.lengths[:2])
    return replace(sequences, lengths=(joined, *sequences.lengths[2:]))


def _pad_seen(sequences: Sequences) -> Sequences:
    """The token before a sequence's first takes part in it, as a left pad without a mask does."""
    bounds = sequences.bounds.tolist()
    bounds[1:-1] = [bound - 1 for bound in bounds[1:-1]]
    return replace(sequences, lengths=tuple(b - a for a, b in pairwise(bounds)))


WRONG: dict[str, tuple[str, int, Callable[[pytest.MonkeyPatch], None]]] = {
    "window one token too wide": ("gemma3_text", 1000, _mask_off_by_one),
    "later token attended": ("qwen3", 1000, _later_token_seen),
    "neighbour attended": ("llama", 1000, _each_sequence(_neighbour_seen)),
    "pad attended": ("llama", 1000, _each_sequence(_pad_seen)),
    "position reset a token late": ("qwen3", 1000, _each_sequence(_reset_late)),
    "window left out": ("gemma3_text", 1000, _each_layer(sliding_window=None)),
    "cap left out": ("gemma2", 1000, _each_layer(softcap=None)),
    "scale left out": ("granite", 1000, _each_layer(scaling=None)),
    "heads in another order": ("qwen3", 1000, _heads_in_another_order),
    "own state scored": ("qwen3", 1000, _own_state_scored),
    "gradient averaged, not weighted": ("llama", 30, _gradient_averaged),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, microbatch_tokens, seed = WRONG[name]
    padded = _reference(family, torch.float64)
    assert_equal(_packed(family, torch.float64, microbatch_tokens), padded, EXACT)

    seed(monkeypatch)

    with pytest.raises(AssertionError):
        assert_equal(_packed(family, torch.float64, microbatch_tokens), padded, EXACT)


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "granite"])
def test_the_kernel_for_several_lengths_is_called_for_what_the_layer_defines(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "has_varlen_kernel", lambda query, softcap: softcap is None)
    monkeypatch.setattr(attention, "varlen_attn", varlen_by_its_documentation)

    found = _packed(family, torch.float64)

    assert_equal(found, _reference(family, torch.float64), EXACT)


def test_the_kernel_for_several_lengths_is_for_16_bits_on_cuda_and_no_cap() -> None:
    class Fake:
        is_cuda, dtype, shape = True, torch.bfloat16, (1, 2, 3, 128)

    query: Any = Fake()
    assert attention.has_varlen_kernel(query, None)
    assert not attention.has_varlen_kernel(query, 50.0)
    for name, other in (("is_cuda", False), ("dtype", torch.float32), ("shape", (1, 2, 3, 512))):
        changed: Any = Fake()
        setattr(changed, name, other)
        assert not attention.has_varlen_kernel(changed, None)


def test_no_pad_is_run() -> None:
    run = [len(m.sequences.token_ids_T) for m in _microbatches(30)]

    assert sum(run) == sum(num_tokens(episode) for episode in _episodes())
    assert max(run) <= 30


def test_equally_long_neighbours_are_one_run() -> None:
    sequences = Sequences.from_token_ids([[3], [4], [5, 6], [7]])

    assert list(sequences.equal_runs()) == [(2, 1, 1), (1, 2, 2), (1, 1, 1)]
    assert sequences.positions_T.tolist() == [0, 0, 0, 1, 0]
    assert sequences.bounds.tolist() == [0, 1, 2, 4, 5]


def test_a_model_with_a_state_between_tokens_is_refused_by_name() -> None:
    config = MambaConfig(vocab_size=48, hidden_size=16, state_size=4, num_hidden_layers=1)
    model = AutoModelForCausalLM.from_config(config).eval()

    with pytest.raises(SettingsError, match=r"run.model must attend within .* MambaForCausalLM"):
        check_packing(model)


def test_a_model_whose_sequences_meet_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_random_model("llama", attn_implementation="eager")
    _each_layer(sequences=Sequences.from_token_ids([range(13)]))(monkeypatch)

    with pytest.raises(SettingsError, match="its sequences would see one another"):
        check_packing(model)
