"""Reward functions of a run, each in processes of its own, and the sum of their rewards.

    free slot --samples--> every function of the slot, side by side --a sum for each sample--> free

A slot has one process for each function; `actors.reward_workers` slots work at the same time, so a
function that hangs holds up one slot and no other. Slots start when they are first needed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from actors.chat import ChatMessage, text_of
from actors.environments.base import Conversation
from configs.errors import RewardError, quoted
from configs.settings import ActorSettings, RunSettings

from .functions import Convention, RewardSample
from .process import Result, RewardProcess

Parts = dict[str, float]
"""Reward of each function, by name."""


class RewardPool:
    """Scores samples with all reward functions of a run.

    Example:
        rewards = RewardPool(settings.run, settings.actors)
        description = await rewards.try_out(environment.begin(0, seed, held_out=False))
        results = await rewards.score(samples)
        await rewards.close()
    """

    def __init__(self, run: RunSettings, actors: ActorSettings) -> None:
        """Make the slots; no process starts yet."""
        self.num_workers = actors.reward_workers
        self._functions = run.reward_functions
        self._group_size = run.group_size
        self._slots = [
            [
                RewardProcess(
                    function,
                    timeout_s=run.reward_timeout_s,
                    memory_mb=actors.reward_memory_mb,
                    retries=actors.reward_retries,
                )
                for function in self._functions.values()
            ]
            for _ in range(self.num_workers)
        ]
        self._conventions: list[Convention] = []
        self._free: asyncio.LifoQueue[list[RewardProcess]] = asyncio.LifoQueue()
        for slot in reversed(self._slots):
            self._free.put_nowait(slot)

    @property
    def group_size(self) -> int | None:
        """Samples of a group that a function judges together; None = no function does."""
        return self._group_size if Convention.GROUP in self._conventions else None

    async def score(self, samples: Sequence[RewardSample]) -> list[Parts | RewardError]:
        """Return for each sample the reward of every function, or the error of one.

        Waits for a free slot; a slot is busy for a bounded time. A function that does not count for
        a sample is left out of its parts. One that cannot be loaded gives errors, too.
        """
        slot = await self._free.get()
        try:
            columns = await asyncio.gather(*(process.score(samples) for process in slot))
        finally:
            self._free.put_nowait(slot)
        return [self._join(results) for results in zip(*columns, strict=True)]

    async def score_by_item(self, samples: Sequence[RewardSample]) -> list[Parts | RewardError]:
        """Score samples of several items, one item at a time where a function judges whole groups.

        Returns:
            As `score`, in the order of `samples`.

        Raises:
            SettingsError: A function cannot be loaded or has unknown parameters.
            RewardError: Loading one crashed or took too long.
        """
        await self._start()
        if self.group_size is None:
            return await self.score(samples)
        rows_of: dict[int, list[int]] = {}
        for row, sample in enumerate(samples):
            rows_of.setdefault(sample.index, []).append(row)
        by_row: dict[int, Parts | RewardError] = {}
        for rows in rows_of.values():
            results = await self.score([samples[row] for row in rows])
            by_row |= zip(rows, results, strict=True)
        return [by_row[row] for row in range(len(samples))]

    async def try_out(self, item: Conversation) -> str:
        """Score the right answer of an item twice, and describe the functions; starts one slot.

        Returns:
            Each function and how it is called, in words for a log.

        Raises:
            SettingsError: A function cannot be loaded or has unknown parameters.
            RewardError: A function fails on the sample, or loading it crashed or took too long.
        """
        await self._start()
        completion = item.answer or ""
        sample = RewardSample.from_conversation(item, [ChatMessage("assistant", completion)])
        for result in await self.score([sample, sample]):
            if isinstance(result, RewardError):
                asked = text_of(sample.prompt)
                raise RewardError(
                    f"run.reward failed on the sample {quoted(asked)} -> {quoted(completion)}: "
                    f"{result}; `nyala env test` tries it again"
                )
        pairs = zip(self._functions.values(), self._conventions, strict=True)
        return "; ".join(f"{function}, called with a {form}" for function, form in pairs)

    async def close(self) -> None:
        """Kill all processes of the pool, and what they have started."""
        for slot in self._slots:
            for process in slot:
                await process.close()

    async def _start(self) -> None:
        """Start one slot, which tells how its functions are called."""
        if not self._conventions:
            self._conventions = [await process.start() for process in self._slots[0]]

    def _join(self, results: Sequence[Result]) -> Parts | RewardError:
        parts: Parts = {}
        for name, result in zip(self._functions, results, strict=True):
            if isinstance(result, RewardError):
                return RewardError(f"{name}: {result}") if len(results) > 1 else result
            if result is not None:
                parts[name] = result
        if not parts:
            return RewardError(
                "a reward must count for each sample, got None from every function; return a "
                "number from one of them"
            )
        return parts


def check_reward(run: RunSettings, actors: ActorSettings, sample: Conversation) -> str:
    """Try the reward of a run on one sample and describe it, before anything starts.

    Returns and raises as `RewardPool.try_out`; without functions it names the environment's score.
    """
    return asyncio.run(_check(run, actors, sample))


def score_answers(
    run: RunSettings, actors: ActorSettings, item: Conversation, answers: Sequence[str]
) -> list[Parts | RewardError]:
    """Let the reward functions of a run judge answers to one item, in processes that then end.

    Returns:
        As `RewardPool.score`: a function that cannot be loaded gives an error for each answer.
    """
    samples = [
        RewardSample.from_conversation(item, [ChatMessage("assistant", answer)])
        for answer in answers
    ]
    return asyncio.run(_score_all(RewardPool(run, actors), samples))


async def _check(run: RunSettings, actors: ActorSettings, sample: Conversation) -> str:
    if not run.reward_functions:
        return f"the score of {run.environment}"
    rewards = RewardPool(run, actors)
    try:
        return await rewards.try_out(sample)
    finally:
        await rewards.close()


async def _score_all(
    rewards: RewardPool, samples: Sequence[RewardSample]
) -> list[Parts | RewardError]:
    try:
        return await rewards.score(samples)
    finally:
        await rewards.close()
