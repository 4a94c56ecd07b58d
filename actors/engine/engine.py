"""Interfaces of engines: `Engine` for the actor, `Stepper` for the model behind it.

An engine steps in a thread or process of its own, never on the event loop, so that heartbeats do
not wait for it. Tokens are collected where they are made and handed over in batches.

`threaded.py` makes an engine of a stepper; the steppers are in `vllm_engine.py` and
`torch_engine.py`. A stepper has no thread, no event loop and no policy versions: its caller labels
the tokens of each step. A swap of weights: `prepare` while steps go on, and `is_prepared` until it
is, then `pause` -> `load` -> `resume` between two of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from broker.protocol.manifest import WeightManifest
from buffer.record.episode import PolicyVersion, VersionSpan
from configs.errors import WeightsOverwritten

from .turns import StopStrings

INITIAL_VERSION = PolicyVersion(0, 0)
"""Default version of the weights in the model directory that an engine starts from."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Tokens wanted after `token_ids`: prompt, earlier turns, what an earlier lease sampled."""

    request_id: str
    token_ids: tuple[int, ...]
    max_tokens: int
    temperature: float
    """0 = greedy. No truncating sampler and no penalty: their log-probs could not be recomputed."""
    stop_token_ids: tuple[int, ...]
    """Generation ends after one of these; it is part of the output."""
    stop_strings: StopStrings | None = None
    """Generation also ends after the token that completes one of these."""
    turn: tuple[int, ...] = ()
    """The last of `token_ids`: what an earlier lease sampled of the turn."""
    stream: tuple[int, int] = (0, 0)
    """Seed and task: the random numbers of an engine that is to repeat itself depend on them."""

    def check_limits(self, *, vocabulary: int, room: int) -> None:
        """Refuse a request that would end the whole engine.

        Args:
            vocabulary: Token ids that the model has.
            room: Tokens that the model's length leaves.

        Raises:
            ValueError: The request has no token, leaves no room for another, or has a token id
                that the model does not have; the text names the setting.
        """
        num_tokens = len(self.token_ids)
        if not num_tokens:
            raise ValueError(
                "a prompt must have at least one token, got none; give every item of "
                "run.environment a prompt that is not empty"
            )
        if room < 1:
            raise ValueError(
                "actors.max_model_len must be > the tokens of a request, got "
                f"{num_tokens + room} for {num_tokens} tokens; raise it, or lower "
                "run.max_prompt_tokens"
            )
        least, largest = min(self.token_ids), max(self.token_ids)
        if least < 0 or largest >= vocabulary:
            raise ValueError(
                f"token ids must be below the vocabulary of run.model = {vocabulary}, got {least} "
                f"to {largest}; this actor, or an earlier one, uses another model's tokenizer: "
                "start all actors with the config.yaml of the run"
            )


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens of one request since the last delta, in order."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """log mu of each token under the processed (temperature-scaled) distribution, nats."""
    versions: tuple[VersionSpan, ...]
    """Starts count from the first token of this delta."""
    finish_reason: str | None
    """None while running; `stop`, `length`, `abort` or `refused` with the last delta."""
    refusal: str | None = None
    """What is wrong with a request that was refused: another try would end alike."""


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """A whole policy version in host memory, its digest already checked."""

    path: Path
    """File (in shared memory) that holds the canonical wire bytes."""
    manifest: WeightManifest
    is_whole: Callable[[], bool] = lambda: True
    """False once newer weights may be in the file: the learner's own slot is not locked."""

    def check_not_overwritten(self) -> None:
        """Check that everything read until now was this version.

        Raises:
            WeightsOverwritten: It may have been a mixture of two versions.
        """
        if not self.is_whole():
            raise WeightsOverwritten(
                f"weights {tuple(self.manifest.version)} must not change while they are read, got "
                "newer ones in their place; the actor fetches them again"
            )


class Engine(Protocol):
    """Samples tokens, and swaps weights between two steps with the KV cache kept."""

    @property
    def version(self) -> PolicyVersion:
        """The policy version that the next token will be sampled from."""
        ...

    async def start(self) -> None:
        """Load the model. Returns when the first request could be served.

        Raises:
            EngineError: it could not be loaded; the class says whether another start may help.
            DeadlineError: it took too long.
        """
        ...

    def submit(self, requests: list[GenerationRequest]) -> None:
        """Begin these requests; their tokens arrive through `deltas`.

        A request takes the place of a running one with the same id.

        Raises:
            EngineError: the engine died.
        """
        ...

    def abort(self, request_ids: list[str]) -> None:
        """Stop these requests without a further delta; unknown ids are ignored."""
        ...

    async def halt(self) -> list[Delta]:
        """Stop all requests, and return their tokens that `deltas` has not returned yet.

        A delta has no finish reason where its request was still running.

        Raises:
            EngineError: the engine died.
            DeadlineError: it did not answer in time.
        """
        ...

    async def deltas(self) -> list[Delta]:
        """Wait for tokens; return all that came since the last call, one delta for each request.

        A finished request is handed over at once; a running one at most every ~0.25 s.

        Raises:
            EngineError: the engine died, or hangs; what it made was returned by earlier calls.
        """
        ...

    async def apply(self, staged: StagedWeights) -> float:
        """Swap to these weights between two steps and return the pause of generation, seconds.

        Raises:
            MixedWeights: they were overwritten while they were loaded; generation stands until the
                next call.
            WeightsError: they are not a version of this model, or were overwritten before loading
                (`WeightsOverwritten`); the old weights go on.
            EngineError: the swap failed half-way, or the engine died.
            DeadlineError: it did not answer in time.
        """
        ...

    async def probe(self, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        """Log-probs of tokens 1.. under the weights of this moment, nats.

        At temperature 1, or a teacher's at that of the run.

        Raises:
            SettingsError: the sequence does not fit into the model's length.
            EngineError: the engine died.
            DeadlineError: it did not answer in time.
        """
        ...

    async def read_back(self, staged: StagedWeights) -> list[str] | None:
        """Name parameters whose stored values are not this version's; None = cannot be read.

        Raises:
            WeightsError: the file is gone.
            EngineError: the engine died.
            DeadlineError: it did not answer in time.
        """
        ...

    async def close(self) -> None:
        """Stop the engine and free its memory; running requests end without a delta.

        Raises:
            DeadlineError: it did not stop in time.
        """
        ...


class Sampled(NamedTuple):
    """Tokens that one step made for one request, or the answer to a probe."""

    key: int
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str | None


class Stepper(Protocol):
    """A model and its running requests.

    Used from one thread only, but for `prepare` and `kill`, which other threads call.
    """

    def start(self) -> None:
        """Load the model and run one forward pass."""
        ...

    @property
    def vocabulary(self) -> int:
        """Token ids that the model has; a larger one would end the engine."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether a step would make tokens."""
        ...

    def admit(self, key: int, request: GenerationRequest, max_tokens: int) -> None:
        """Add a request; its tokens, at most `max_tokens`, come out of the steps to come.

        Raises:
            ValueError: the model cannot serve this one request.
        """
        ...

    def cancel(self, keys: list[int]) -> None:
        """Drop requests; unknown keys are ignored."""
        ...

    def begin_probe(self, key: int, token_ids: tuple[int, ...]) -> None:
        """Score a sequence; a step to come returns its log-probs with a finish reason."""
        ...

    def step(self) -> Iterable[Sampled]:
        """Make at least one token for some requests, or answer a probe."""
        ...

    def pause(self) -> Iterable[Sampled]:
        """Make no more tokens; return those made under these weights and not yet returned."""
        ...

    def resume(self) -> None:
        """Go on after `pause`."""
        ...

    def prepare(self, staged: StagedWeights) -> bool:
        """Do the part of a swap that needs no pause, in another thread while steps go on.

        `load` of this version may follow or not.

        Returns:
            False where `is_prepared` has to be called until it returns True.

        Raises:
            WeightsError: the file is not a version of this model, or was overwritten; nothing
                changed.
        """
        ...

    def is_prepared(self, staged: StagedWeights) -> bool:
        """Whether other processes have prepared their part of the swap, beside the steps.

        Raises:
            WeightsError: as in `prepare`.
        """
        ...

    def load(self, staged: StagedWeights) -> None:
        """Swap to the prepared weights while paused; running requests go on, KV kept or made anew.

        Raises:
            WeightsOverwritten: they were overwritten while they were read, so the model is a
                mixture until another `load`.
        """
        ...

    def read_back(
        self, staged: StagedWeights, moved: Callable[[], object] = lambda: None
    ) -> list[str] | None:
        """Name parameters whose stored values are not this version's; None = cannot be read.

        Args:
            staged: The version.
            moved: Called repeatedly while parameters are read, where this process reads them.

        Raises:
            WeightsError: the file is gone.
        """
        ...

    def check_health(self) -> None:
        """Look whether the model is alive.

        Raises:
            EngineDied: it is not.
        """
        ...

    def rest(self) -> Iterable[Sampled]:
        """Return tokens that were made and not yet returned, of a model that may be dead."""
        ...

    def kill(self) -> None:
        """End a model that hangs, from another thread, where that is possible: `step` raises."""
        ...

    def close(self) -> None:
        """Free the model and its memory."""
        ...
