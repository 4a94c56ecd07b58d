"""Words to spell backwards, with a small engine that lets a few answers stand still for seconds.

An actor makes its engine first, whose methods are others once this module is imported. Processes
without an engine import none.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from unittest import mock

from actors.engine.engine import GenerationRequest, Sampled
from actors.environments.reasoning_gym import ReasoningGym

if TYPE_CHECKING:
    from actors.engine.torch_engine import TorchStepper

FIRST = 2  # tokens before an answer stands still
SHORTEST_S, TAIL, LONGEST_S = 0.2, 1.1, 10.0
"""Seconds that it does: Pareto distributed, cut off."""

engine: Any = sys.modules.get("actors.engine.torch_engine")
plain: dict[str, Any] = {} if engine is None else dict(vars(engine.TorchStepper))
"""The methods as they were."""


@dataclass
class StandingAnswer:
    """A sampled answer that stands still, or will once it has its first tokens."""

    request: GenerationRequest
    max_tokens: int
    due: float = float("inf")
    """When it goes on, on the monotonic clock."""


standing: dict[int, StandingAnswer] = {}


def admit(stepper: TorchStepper, key: int, request: GenerationRequest, max_tokens: int) -> None:
    """Admit an answer with its first tokens alone; greedy ones never stand still."""
    if request.temperature and max_tokens > FIRST:
        standing[key] = StandingAnswer(request, max_tokens - FIRST)
        max_tokens = FIRST
    plain["admit"](stepper, key, request, max_tokens)


def cancel(stepper: TorchStepper, keys: list[int]) -> None:
    """Forget answers."""
    for key in keys:
        standing.pop(key, None)
    plain["cancel"](stepper, keys)


def has_work(stepper: TorchStepper) -> bool:
    """Whether answers are sampled or stand still."""
    return bool(standing) or plain["has_work"].fget(stepper)


def step(stepper: TorchStepper) -> Iterable[Sampled]:
    """Let the answers that are due go on, and make a token for all that do not stand still."""
    now = time.monotonic()
    for key in [key for key, answer in standing.items() if answer.due <= now]:
        answer = standing.pop(key)
        plain["admit"](stepper, key, answer.request, answer.max_tokens)
    if not plain["has_work"].fget(stepper):
        time.sleep(0.005)
        return []
    return [noted(sampled, now) for sampled in plain["step"](stepper)]


def noted(sampled: Sampled, now: float) -> Sampled:
    """Note a token of an answer, which is not at its end after the first ones."""
    answer = standing.get(sampled.key)
    if answer is None:
        return sampled
    token_ids = (*answer.request.token_ids, *sampled.token_ids)
    answer.request = replace(answer.request, token_ids=token_ids)
    if sampled.finish_reason != "length":
        return sampled
    answer.due = now + min(SHORTEST_S * random.paretovariate(TAIL), LONGEST_S)
    return sampled._replace(finish_reason=None)


class TailedWords(ReasoningGym):
    """Settings: those of the dataset."""


if engine is not None:
    mock.patch.multiple(
        engine.TorchStepper, admit=admit, cancel=cancel, step=step, has_work=property(has_work)
    ).start()
