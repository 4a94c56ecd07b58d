"""A prompt that is computed once for its completions: as one that is repeated for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from buffer.record.episode import Episode
from configs.errors import SettingsError
from learner.algorithm.microbatch import AttendedTokens, Microbatch, Sequences, UniformSequences
from learner.data import batch
from learner.model import attention, policy
from learner.model.attention import check_packing
from learner.model.policy import Policy
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
from tests.learner.support.made_episodes import make_episode
from tests.learner.support.padded import PaddedPolicy
from tests.learner.support.random_models import make_random_model
from tests.learner.support.varlen import varlen_by_its_documentation

PROMPTS = (3, 6, 6, 1)  # tokens; windows of the models have four
LENGTHS = (2, 9, 2, 5, 12, 1, 2, 9, 4, 4, 1, 7)


def _episodes() -> list[Episode]:
    """Three completions of each prompt, and two whose prompts are no other's."""
    random = np.random.default_rng(3)
    prompts = [random.integers(3, 48, size=size).tolist() for size in PROMPTS]
    prompts = [prompt for prompt in prompts for _ in range(3)]
    prompts[1] = [*prompts[0][:-1], 1]  # of the group, but not the same tokens
    return [
        make_episode(
            task_id,
            group_id=task_id // 3,
            prompt=prompts[task_id],
            completion=random.integers(3, 48, size=length).tolist(),
            logprobs=random.uniform(-4, -2, size=length).tolist(),
            mask=[1, *random.integers(0, 2, size=length - 1).tolist()],
            reward=float(random.uniform()),
        )
        for task_id, length in enumerate(LENGTHS)
    ]


def _alone(family: str, dtype: torch.dtype) -> Found:
    """Each episode by itself, padded rows, all logits, attention by its definition."""
    microbatches = packed(_episodes(), 1)
    assert all(microbatch.sequences.seen is None for microbatch in microbatches)
    return train(PaddedPolicy(make_model(family, dtype)), microbatches)


def _shared(family: str, dtype: torch.dtype, microbatch_tokens: int = 1000) -> Found:
    microbatches = packed(_episodes(), microbatch_tokens)
    assert any(microbatch.sequences.seen is not None for microbatch in microbatches)
    return train(Policy(make_model(family, dtype), temperature=1.0), microbatches)


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_shared_prompt_equals_a_repeated_one(
    family: str, dtype: torch.dtype, tolerance: float
) -> None:
    alone = _alone(family, dtype)

    for microbatch_tokens in (1000, 20):
        assert_equal(_shared(family, dtype, microbatch_tokens), alone, tolerance)

    assert all(float(gradient.abs().max()) > 0 for gradient in alone[1])


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_the_kernel_for_several_lengths_is_called_with_what_each_sees(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "has_varlen_kernel", lambda query, softcap: softcap is None)
    monkeypatch.setattr(attention, "varlen_attn", varlen_by_its_documentation)

    assert_equal(_shared(family, torch.float64), _alone(family, torch.float64), EXACT)


def _sequences(change: Callable[[Sequences], Sequences]) -> Callable[[pytest.MonkeyPatch], None]:
    """A wrong variant of what a forward pass is given."""

    def seed(monkeypatch: pytest.MonkeyPatch) -> None:
        right = policy.Policy.forward

        def forward(
            self: Policy, s: Sequences, indices_N: Tensor, **how: Any
        ) -> policy.TokenScores:
            return right(self, s if s.seen is None else change(s), indices_N, **how)

        monkeypatch.setattr(policy.Policy, "forward", forward)

    return seed


def _masked(
    change: Callable[[int, int, int | None], Tensor | None],
) -> Callable[[pytest.MonkeyPatch], None]:
    """A wrong mask of completions: of own tokens, tokens seen, window."""

    def seed(monkeypatch: pytest.MonkeyPatch) -> None:
        right = attention._mask

        def mask(length: int, seen: int, window: int | None, device: torch.device) -> Tensor | None:
            if seen == length:
                return right(length, seen, window, device)
            return change(length, seen, window)

        monkeypatch.setattr(attention, "_mask", mask)

    return seed


def _begins(s: Sequences) -> Tensor:
    """First tokens of completions that share a prompt."""
    assert s.seen is not None
    continues = torch.tensor(s.seen.lengths) > torch.tensor(s.lengths)
    return s.bounds[:-1][continues].long()


def _position_from_zero(s: Sequences) -> Sequences:
    positions_T = s.positions_T.clone()
    for begin in _begins(s):
        end = s.bounds[s.bounds > begin][0]
        positions_T[begin:end] = torch.arange(int(end - begin))
    return replace(s, positions_T=positions_T)


def _first_reads_its_neighbour(s: Sequences) -> Sequences:
    before_T = s.before_T.clone()
    before_T[_begins(s)] = _begins(s) - 1
    return replace(s, before_T=before_T)


def _seen_by_each(s: Sequences, change: Callable[[int, Tensor, list[Tensor]], Tensor]) -> Sequences:
    assert s.seen is not None
    each = list(s.seen.places.split(list(s.seen.lengths)))
    continues = [len(e) > length for e, length in zip(each, s.lengths, strict=True)]
    changed = [change(n, e, each) if continues[n] else e for n, e in enumerate(each)]
    lengths = tuple(len(e) for e in changed)
    bounds = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    return replace(s, seen=AttendedTokens(torch.cat(changed), bounds, lengths))


def _neighbour_too(s: Sequences) -> Sequences:
    """The completion before, if there is one, stands between prompt and completion."""

    def change(n: int, own: Tensor, each: list[Tensor]) -> Tensor:
        length = s.lengths[n]
        other = each[n - 1][-s.lengths[n - 1] :]
        return torch.cat([own[:-length], other, own[-length:]])

    return _seen_by_each(s, change)


def _prompt_unseen(s: Sequences) -> Sequences:
    return _seen_by_each(s, lambda n, own, _: own[-s.lengths[n] :])


def _prompt_without_its_end(s: Sequences) -> Sequences:
    def change(n: int, own: Tensor, _: list[Tensor]) -> Tensor:
        places = torch.arange(len(own))
        return own[places != len(own) - s.lengths[n] - 1]

    return _seen_by_each(s, change)


def _another_prompt(s: Sequences) -> Sequences:
    def change(n: int, own: Tensor, each: list[Tensor]) -> Tensor:
        number = len(own) - s.lengths[n]
        others = [e for e in each if len(e) == number and int(e[0]) != int(own[0])]
        return torch.cat([others[0], own[number:]]) if others else own

    return _seen_by_each(s, change)


def _gradient_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows taken several times, only the first gives its gradient back."""
    right = attention.take

    def take(states_TW: Tensor, places: Tensor) -> Tensor:
        order = places.sort(stable=True)
        is_first = torch.ones_like(places, dtype=torch.bool)
        is_first[order.indices[1:]] = order.values.diff() != 0
        rows = right(states_TW, places)
        return torch.where(is_first[:, None], rows, rows.detach())

    monkeypatch.setattr(attention, "take", take)


def _state_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _gradient_once(monkeypatch)
    monkeypatch.setattr(policy, "take", attention.take)
    monkeypatch.setattr(attention, "take", _TAKE)


_TAKE = attention.take


def _by_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "_prompt", lambda e: int(e.group_id).to_bytes(4, "big"))


def _facts_in_the_order_of_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Completions lie in the order of their lengths; what was recorded of them does not."""
    right = batch._concatenate

    def concatenate(layout: Any) -> Microbatch:
        rows = sorted(layout.rows, key=lambda row: row.episode.task_id)
        completions = [row.episode.completion for row in rows]
        recorded = [c.behaviour_logprobs[c.loss_mask.astype(bool)] for c in completions]
        recorded_N = torch.from_numpy(np.concatenate(recorded))
        return replace(right(layout), behaviour_logprobs_N=recorded_N)

    monkeypatch.setattr(batch, "_concatenate", concatenate)


def _lower(length: int, seen: int, offset: int, window: int | None = None) -> Tensor:
    mask = torch.ones(length, seen, dtype=torch.bool).tril(offset)
    return mask if window is None else mask.triu(offset - window + 1)


WRONG: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "neighbour's completion attended": ("qwen3", _sequences(_neighbour_too)),
    "prompt not attended": ("llama", _sequences(_prompt_unseen)),
    "prompt without its last token": ("llama", _sequences(_prompt_without_its_end)),
    "another prompt of its length": ("qwen3", _sequences(_another_prompt)),
    "position not continued": ("qwen3", _sequences(_position_from_zero)),
    "first token predicted from its neighbour": (
        "qwen3",
        _sequences(_first_reads_its_neighbour),
    ),
    "causal from the first key, not to the last": (
        "llama",
        _masked(lambda length, seen, _: _lower(length, seen, 0)),
    ),
    "later token attended": (
        "qwen3",
        _masked(lambda length, seen, _: _lower(length, seen, seen - length + 1)),
    ),
    "window counted within the completion": (
        "gemma3_text",
        _masked(
            lambda length, seen, window: _lower(
                length, seen, seen - length, window and window + seen - length
            )
        ),
    ),
    "window left out": (
        "gemma2",
        _masked(lambda length, seen, _: _lower(length, seen, seen - length)),
    ),
    "gradient of the keys counted once": ("granite", _gradient_once),
    "gradient of the prompt's last state counted once": ("llama", _state_once),
    "one prompt for a group, whatever its tokens": ("qwen3", _by_group),
    "facts of another episode": ("llama", _facts_in_the_order_of_tasks),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, seed = WRONG[name]
    alone = _alone(family, torch.float64)

    seed(monkeypatch)

    with pytest.raises(AssertionError):
        assert_equal(_shared(family, torch.float64), alone, EXACT)


def test_a_model_whose_completions_do_not_see_their_prompt_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_random_model("llama", attn_implementation="eager")
    right = attention.run_trunk
    monkeypatch.setattr(attention, "run_trunk", lambda t, s, cut: right(t, _prompt_unseen(s), cut))

    with pytest.raises(SettingsError, match="its sequences would see one another"):
        check_packing(model)


def test_a_sequence_may_continue_one_that_continues_another() -> None:
    chain = Sequences.from_token_ids([[3, 4], [5], [6, 7]], prefixes=[None, 0, 1])

    assert chain.positions_T.tolist() == [0, 1, 2, 3, 4]
    assert chain.before_T.tolist() == [0, 0, 1, 2, 3]
    assert chain.seen is not None and chain.seen.lengths == (2, 3, 5)
    assert UniformSequences(1, 2, 5) in list(chain.equal_runs())
