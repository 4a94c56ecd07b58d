"""Bench of the engine tests: transcripts of deltas, compared with a plain forward pass."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import Qwen3ForCausalLM

from actors.engine.engine import Delta, GenerationRequest, StagedWeights
from actors.engine.threaded import ThreadedEngine
from buffer.record.episode import PolicyVersion, VersionSpan
from tests.actors.support.tiny_model import (
    VOCABULARY,
    make_model,
    perturb,
    reference_logprobs,
    stage,
)


@dataclass
class Transcript:
    """All that came of one request."""

    request: GenerationRequest
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[VersionSpan] = field(default_factory=list)
    finish_reason: str | None = None
    num_deltas: int = 0


class Bench:
    """An engine, a copy of the model of each of its versions, and what came of its requests."""

    def __init__(self, engine: ThreadedEngine, model: Qwen3ForCausalLM, folder: Path) -> None:
        self.engine = engine
        self.model = model
        self.folder = folder
        self.models = {engine.version: copy.deepcopy(model)}
        self.transcripts: dict[str, Transcript] = {}
        self._random = torch.Generator().manual_seed(0)
        self._count = 0

    def prompt(self, length: int) -> tuple[int, ...]:
        ids = torch.randint(2, VOCABULARY, (length,), generator=self._random)
        return tuple(ids.tolist())

    def request(
        self,
        *,
        max_tokens: int,
        temperature: float = 1.0,
        token_ids: tuple[int, ...] | None = None,
        stop: tuple[int, ...] = (),
    ) -> GenerationRequest:
        self._count += 1
        length = 3 + 7 * self._count % 40
        return GenerationRequest(
            request_id=f"request-{self._count}",
            token_ids=token_ids or self.prompt(length),
            max_tokens=max_tokens,
            temperature=temperature,
            stop_token_ids=stop,
        )

    def submit(self, *requests: GenerationRequest) -> list[Transcript]:
        transcripts = [Transcript(request) for request in requests]
        self.transcripts |= {t.request.request_id: t for t in transcripts}
        self.engine.submit(list(requests))
        return transcripts

    async def read(self, until: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not until():
                self.note(await self.engine.deltas())

    def note(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            transcript = self.transcripts[delta.request_id]
            assert transcript.finish_reason is None
            assert len(delta.token_ids) == len(delta.logprobs)
            offset = len(transcript.token_ids)
            transcript.versions += [
                VersionSpan(span.version, span.start + offset)
                for span in delta.versions
                if not transcript.versions or transcript.versions[-1].version != span.version
            ]
            transcript.token_ids += delta.token_ids
            transcript.logprobs += delta.logprobs
            transcript.finish_reason = delta.finish_reason
            transcript.num_deltas += 1

    async def finish(self, transcripts: list[Transcript]) -> None:
        await self.read(lambda: all(t.finish_reason for t in transcripts))

    def stage_next(self) -> StagedWeights:
        """Move the model, and stage it as the version after the newest."""
        last = max(self.models)
        version = PolicyVersion(last.lineage, last.step + 1)
        perturb(self.model, seed=version.step)
        self.models[version] = copy.deepcopy(self.model)
        return stage(self.model, self.folder / f"weights-{version.step % 2}", version)

    def log_ratio(self, transcript: Transcript) -> torch.Tensor:
        """log pi(token) by a forward pass of its version, minus what the engine said."""
        assert len(transcript.versions) == 1
        request = transcript.request
        ids = list(request.token_ids) + transcript.token_ids
        reference = reference_logprobs(
            self.models[transcript.versions[0].version], ids, temperature=request.temperature or 1.0
        )
        return reference[len(request.token_ids) - 1 :] - torch.tensor(transcript.logprobs)


def tiny_folder(folder: Path, *, tied: bool) -> Qwen3ForCausalLM:
    """Save a tiny model for an engine to start from; return it."""
    model = make_model(tied=tied)
    model.save_pretrained(folder)
    return model
