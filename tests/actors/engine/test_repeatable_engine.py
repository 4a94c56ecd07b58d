"""The torch engine that repeats itself: every token and log-prob is the same bits, however made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from actors.engine.engine import GenerationRequest
from actors.engine.torch_engine import TokenPlace, TorchOptions, TorchStepper, draws_of_places
from buffer.record.episode import PolicyVersion
from tests.actors.support.engine_probe import tiny_folder
from tests.actors.support.tiny_model import stage

LIMIT = 40
Sampled = list[tuple[int, float]]
"""Token and log-prob of each place."""

PROMPTS = [tuple(range(3, 3 + length)) for length in (5, 9, 5, 16)]
REQUESTS = [
    GenerationRequest(f"{task}", prompt, LIMIT, 1.0, (), stream=(11, task))
    for task, prompt in enumerate(PROMPTS)
]


def _opened(folder: Path) -> TorchStepper:
    options = TorchOptions(str(folder), max_model_len=256, max_concurrent=1, deterministic=True)
    stepper = TorchStepper(options)
    stepper.start()
    return stepper


def _sample(stepper: TorchStepper, *requests: GenerationRequest) -> list[Sampled]:
    """Sample requests that are all there from the beginning."""
    made: dict[int, Sampled] = {}
    for key, request in enumerate(requests):
        made[key] = []
        stepper.admit(key, request, request.max_tokens)
    while stepper.has_work:
        for each in stepper.step():
            if each.key in made:
                made[each.key] += zip(each.token_ids, each.logprobs, strict=True)
    return list(made.values())


def _continued(request: GenerationRequest, sampled: Sampled, at: int) -> GenerationRequest:
    """The request of the actor that goes on after `at` tokens."""
    turn = tuple(token for token, _ in sampled[:at])
    left = request.max_tokens - at
    return replace(request, token_ids=request.token_ids + turn, turn=turn, max_tokens=left)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    tiny_folder(place, tied=True)
    return place


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[Sampled]:
    """What each request brings in an engine of its own."""
    return [_sample(_opened(folder), request)[0] for request in REQUESTS]


@pytest.fixture
def stepper(folder: Path) -> TorchStepper:
    return _opened(folder)


def test_what_else_is_sampled_changes_no_bit(stepper: TorchStepper, alone: list[Sampled]) -> None:
    assert _sample(stepper, *reversed(REQUESTS)) == alone[::-1]
    stepper.begin_probe(99, PROMPTS[3])
    assert _sample(stepper, *REQUESTS) == alone


@pytest.mark.slow
def test_an_episode_that_is_continued_at_any_token_is_the_same(
    stepper: TorchStepper, alone: list[Sampled]
) -> None:
    request, whole = REQUESTS[1], alone[1]
    for at in range(1, LIMIT):
        (rest,) = _sample(stepper, _continued(request, whole, at))
        assert rest == whole[at:], at


def test_the_same_weights_swapped_in_change_no_bit(
    stepper: TorchStepper, alone: list[Sampled], tmp_path: Path
) -> None:
    staged = stage(stepper._model, tmp_path / "weights", PolicyVersion(1, 0))

    stepper.prepare(staged)
    stepper.load(staged)

    assert _sample(stepper, *REQUESTS) == alone


def test_weights_that_lie_askew_in_a_file_are_laid_straight(stepper: TorchStepper) -> None:
    assert {parameter.data_ptr() % 64 for parameter in stepper._parameters.values()} == {0}


@pytest.mark.parametrize(
    "change",
    [
        lambda request: replace(request, stream=(11, 99)),
        lambda request: replace(request, stream=(12, request.stream[1])),
    ],
    ids=["task", "seed"],
)
def test_another_task_or_seed_draws_other_tokens(
    stepper: TorchStepper,
    alone: list[Sampled],
    change: Callable[[GenerationRequest], GenerationRequest],
) -> None:
    (other,) = _sample(stepper, change(REQUESTS[0]))

    assert [token for token, _ in other] != [token for token, _ in alone[0]]


def test_draws_of_places_are_exponential_and_independent() -> None:
    places = [
        TokenPlace((seed, task), at) for seed in (1, 2) for task in (1, 2) for at in range(64)
    ]
    draws = draws_of_places(places, torch.zeros(len(places), 64, dtype=torch.float64)).exp()

    assert len(set(draws.flatten().tolist())) == draws.numel()
    # Of 2^14 draws: mean 1 and variance 1, each within four standard errors.
    assert abs(float(draws.mean()) - 1) < 4 / 128
    assert abs(float(draws.var()) - 1) < 4 * np.sqrt(8) / 128
    between = torch.corrcoef(draws).fill_diagonal_(0)
    assert float(between.abs().max()) < 6 / np.sqrt(64)
