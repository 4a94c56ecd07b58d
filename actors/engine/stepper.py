"""What a model must be able to do for `ThreadedEngine`: one step at a time, from one thread.

Steppers: `vllm_engine.py` and `torch_engine.py`. A stepper knows neither threads nor event loop,
nor what a policy version is: the thread labels what a step returns.

A swap: `prepare` while steps go on, then `pause` -> `load` -> `resume` between two of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from .engine import Request, StagedWeights


class Sampled(NamedTuple):
    """What one step made for one request, or the answer of a probe."""

    key: int
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str | None


class Stepper(Protocol):
    """A model and its running requests, used from one thread only, but for `prepare`."""

    def start(self) -> None:
        """Load the model and run one forward pass."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether a step would make tokens."""
        ...

    def admit(self, key: int, request: Request, max_tokens: int) -> None:
        """Add a request; its tokens, at most `max_tokens`, come out of the steps to come."""
        ...

    def cancel(self, keys: list[int]) -> None:
        """Drop requests; unknown keys are ignored."""
        ...

    def begin_probe(self, key: int, token_ids: tuple[int, ...]) -> None:
        """Score a sequence; a step to come returns its log-probs with a finish reason."""
        ...

    def step(self) -> Iterable[Sampled]:
        """Make at least one token for some requests."""
        ...

    def pause(self) -> Iterable[Sampled]:
        """Make no more tokens; return those made under these weights and not yet returned."""
        ...

    def resume(self) -> None:
        """Go on after `pause`."""
        ...

    def prepare(self, staged: StagedWeights) -> None:
        """Do all of a swap that steps need not wait for, in another thread. `load` follows, or not.

        Raises:
            WeightsError: the file is not a version of this model; nothing changed.
        """
        ...

    def load(self, staged: StagedWeights) -> None:
        """Swap to the prepared weights while paused; running requests keep their KV cache."""
        ...

    def close(self) -> None:
        """Free the model."""
        ...
