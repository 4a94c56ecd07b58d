"""Rows of many turns: sampled through a real broker and Redis by killed actors, and trained.

The engine has no model: a token is a function of its place, so a row that was continued must equal
one that never was interrupted.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from actors.engine.engine import Delta, GenerationRequest
from actors.environments.base import Score, Segment, Step
from actors.environments.calls import EnvironmentSource
from buffer import operations
from buffer.record.codec import decode_episode, encode_episode
from buffer.record.episode import Episode, VersionSpan
from configs.settings import LearnerSettings, RunSettings, Settings
from configs.validation.store import BYTES_BESIDE_TOKENS
from console.run.card_memory import card_memory
from tests.actors.support.fake_actor import Actor, KilledLoop
from tests.actors.support.fake_engine import STOP, FakeEngine, hang_after
from tests.broker.support.ring import GROUP, begin, ring, until_stats
from tests.learner.support.random_models import ARCHITECTURES, SIZE
from tests.learner.support.ranks.long_rows import FAMILY
from tests.learner.support.ranks.several_ranks import run_ranks
from tests.waiting import until

PROMPT, OBSERVATION = "begin:", "next:"
POINTER = {"digest": "d", "endpoint": "tcp://127.0.0.1:1", "public_key": "k" * 40}
LONG_TASK = 0
"""The other of its group is done after a turn."""


@dataclass(frozen=True)
class Row:
    """How a row is made."""

    tokens: int
    """Of its completion."""
    turn: int
    """Tokens of a turn."""
    step: int
    """Tokens that the engine makes at a time."""
    shares_prompt: bool = True
    """Whether both of a group have the same prompt."""


class Errand:
    """An environment whose first task never ends by itself."""

    def __init__(self, shares_prompt: bool, seed: int = LONG_TASK) -> None:
        self.prompt = PROMPT if shares_prompt or seed == LONG_TASK else PROMPT.upper()
        self._shares_prompt, self._is_long = shares_prompt, seed == LONG_TASK
        self.answer = None
        self.demonstration: tuple[Segment, ...] = ()
        self._turns = 0

    def begin(self, index: int, seed: int, *, held_out: bool) -> Errand:
        return Errand(self._shares_prompt, seed)

    def describe(self) -> str:
        return "errand"

    def step(self, text: str) -> Step:
        self._turns += 1
        return Step(OBSERVATION, done=False) if self._is_long else Step()

    def score(self) -> Score:
        return Score(float(self._turns))


def token_at(row: Row, places: np.ndarray) -> np.ndarray:
    """The tokens of the policy at these places of a completion."""
    in_turn = places % (row.turn + len(OBSERVATION))
    return np.where(in_turn == row.turn - 1, STOP, 1 + places * 7 % 60).astype(np.int32)


class LongEngine(FakeEngine):
    """Makes the tokens of places."""

    def __init__(self, row: Row) -> None:
        super().__init__(lambda _: STOP, tokens_per_step=row.step)
        self._row = row

    def _advance(self, request: GenerationRequest) -> Delta:
        row, first = self._row, len(request.token_ids) - len(PROMPT)
        left = row.turn - first % (row.turn + len(OBSERVATION))
        number = min(self.tokens_per_step, left, request.max_tokens)
        places = np.arange(first, first + number)
        tokens = tuple(token_at(row, places).tolist())
        reason = "stop" if number == left else None
        if reason is None and number == request.max_tokens:
            reason = "length"
        del self._running[request.request_id]
        if reason is None:
            self._running[request.request_id] = GenerationRequest(
                request.request_id,
                request.token_ids + tokens,
                request.max_tokens - number,
                request.temperature,
                request.stop_token_ids,
            )
        logprobs = tuple((-4.0 - places % 8 / 8).tolist())
        spans = (VersionSpan(self.version, 0),)
        return Delta(request.request_id, tokens, logprobs, spans, reason)


def killed_and_continued(
    redis_url: str, keys: Path, row: Row, *, patience_s: float = 60.0
) -> list[Episode]:
    """Sample a group whose actor is killed half-way; its episodes as the learner claims them."""

    async def tell() -> list[Episode]:
        most = BYTES_BESIDE_TOKENS + 4 * 1024 + 9 * row.tokens
        limits = {"max_episode_bytes": most, "max_message_bytes": most + 2**17}
        lease: dict[str, Any] = {"lease_timeout_s": 2.0, "reap_every_s": 0.1}
        async with ring(
            redis_url, keys, max_completion_tokens=row.tokens, **limits, **lease
        ) as here:
            await begin(here.store, groups=1, units_per_batch=1)
            await here.store.run(operations.publish(1, 0, POINTER))
            await until(lambda: here.parts.cache.publication)
            how: dict[str, Any] = {
                "run": {"max_completion_tokens": row.tokens},
                "environments": [EnvironmentSource(lambda: Errand(row.shares_prompt))],
            }
            first = Actor(here, "first", engine=LongEngine(row), kind=KilledLoop, **how)
            hang_after(first.engine, row.tokens // row.step // 2)

            async def has_stored() -> bool:
                task = (await here.store.run(operations.inspect((LONG_TASK,))))[LONG_TASK]
                # The other episode of the group has made a turn.
                return task.length >= row.tokens // 4 and task.length + row.turn >= made()

            def made() -> int:
                return first.loop.sampling.num_tokens

            await until(has_stored, lambda: f"{made()} tokens", timeout_s=patience_s)
            first.life.cancel()
            await asyncio.gather(first.life, return_exceptions=True)
            second = Actor(here, "second", engine=LongEngine(row), **how)
            await until_stats(here, lambda s: s.buffered == GROUP, timeout_s=patience_s)
            claim = await here.store.run(operations.claim(1, 1, 1, start=True))
            ids = [task_id for unit in claim.units for task_id in unit.task_ids]
            records = await here.store.run(operations.records(ids))
            second.loop.stop()
            await second.end()
            return [decode_episode(record) for record in records if record is not None]

    return asyncio.run(asyncio.wait_for(tell(), 3 * patience_s))


def assert_whole(episodes: list[Episode], row: Row) -> None:
    """Nothing is lost, nothing is there twice, and both actors made their part."""
    assert sorted(episode.task_id for episode in episodes) == [0, 1]
    completion = min(episodes, key=lambda episode: episode.task_id).completion
    number = len(completion.token_ids)
    assert row.tokens - len(OBSERVATION) <= number <= row.tokens
    assert [run.incarnation for run in completion.fences] == ["first", "second"]
    assert completion.fences[1].start >= row.tokens // 4
    places = np.arange(number)
    sampled = places % (row.turn + len(OBSERVATION)) < row.turn
    np.testing.assert_array_equal(completion.loss_mask.astype(bool), sampled)
    np.testing.assert_array_equal(completion.token_ids[sampled], token_at(row, places)[sampled])
    [long] = [episode for episode in episodes if episode.task_id == LONG_TASK]
    assert long.environment_metrics["restarted"] == 0
    assert long.environment_metrics["resumed_tokens"] == completion.fences[1].start


def trained(
    folder: Path,
    episodes: list[Episode],
    *ranks: int,
    weights_at_once: int = 2**24,
    within_s: float = 200.0,
    **shape: float,
) -> dict[int, dict[str, Any]]:
    """Train them by so many ranks; what each number of these has found, `computed` beside it."""
    folder.mkdir(exist_ok=True)
    for episode in episodes:
        (folder / f"{episode.task_id}.record").write_bytes(encode_episode(episode))
    alone = len({episode.prompt_ids.tobytes() for episode in episodes}) > 1
    longest = max(len(episode.completion.token_ids) for episode in episodes)
    shape = {"vocab_size": 96, "max_position_embeddings": 2**18} | shape
    case = {
        "shape": shape,
        "tokens": longest,
        "alone": alone,
        "weights_at_once": weights_at_once,
    }
    (folder / "case.json").write_text(json.dumps(case))
    run_ranks(folder, *(("long_rows", size) for size in ranks), within_s=within_s)
    found = {}
    for size in ranks:
        each = [
            json.loads((folder / f"found-{size}-{rank}.json").read_text()) for rank in range(size)
        ]
        most = max(rank["peak_bytes"] for rank in each)
        found[size] = each[0] | {"peak_bytes": most, "computed": _computed(shape, longest, size)}
    return found


def _computed(shape: dict[str, float], tokens: int, ranks: int) -> int:
    """What `nyala up` computes, without the states that are there before."""
    run = RunSettings(
        model="-", max_prompt_tokens=8, max_completion_tokens=tokens, groups_per_batch=1
    )
    settings = Settings.model_validate(
        {
            "run": run.model_copy(update={"group_size": 1}),
            "learner": LearnerSettings(ranks=ranks, activation_checkpointing="none"),
            "parallel": {"sequence": ranks},
        }
    )
    config = {"model_type": FAMILY, **SIZE, **ARCHITECTURES[FAMILY], **shape}
    memory = card_memory(settings, config, on_gpu=False)
    return memory.total - sum(memory.states.values())


def largest_difference(folder: Path, ranks: int) -> float:
    """Largest error of the gradients of so many ranks beside one's, relative to the largest."""
    alone, shared = (torch.load(folder / f"gradients-{size}.pt") for size in (1, ranks))
    return max(
        float((shared[name] - alone[name]).abs().max() / alone[name].abs().max()) for name in alone
    )
