"""An actor without a model: the real loop, broker client and environment around a fake engine."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from actors.engine.tokenizer import Tokenizer
from actors.environments.calculator import Calculator, evaluate
from actors.environments.calls import EnvironmentSource
from actors.episodes.held_leases import SwapGate
from actors.episodes.maker import EpisodeMaker
from actors.loop import ActorLoop, EpisodeTools
from actors.rewards.pool import RewardPool
from broker.protocol.messages import Publication
from buffer.record.episode import PolicyVersion
from configs.errors import RewardError
from configs.settings import ActorSettings, RunSettings, Settings
from tests.actors.support.fake_engine import ALPHABET, CharacterTokenizer, FakeEngine
from tests.broker.support.ring import FIRST, GROUP, RUN, Ring, hello


def solve(context: tuple[int, ...]) -> int:
    """A policy that asks the calculator for the product and then answers rightly."""
    question, _, spoken = CharacterTokenizer().decode(context).partition("=")
    match = re.search(r"\d+\*\d+", question)
    assert match is not None
    product = match.group()
    script = f"[{product}]\0{evaluate(product)};{evaluate(question)}\0"
    assert script.startswith(spoken), (question, spoken)
    return ALPHABET.index(script[len(spoken)])


class FakeWeights:
    """Weights that are always there; `offer` is all that the loop can get wrong."""

    is_dirty = False
    figures: Mapping[str, float] = {"weight_transfer_s": 1.5, "weight_pause_s": 0.25}

    def __init__(self) -> None:
        self.offered: list[Publication] = []
        self.news = asyncio.Event()

    async def newer_than(self, version: PolicyVersion) -> None:
        await self.news.wait()
        self.news.clear()

    def offer(self, publication: Publication | None) -> None:
        if publication is not None:
            self.offered.append(publication)

    async def first_sync(self, publication: Publication) -> PolicyVersion:
        return publication.version

    async def run(self) -> None:
        await asyncio.Event().wait()


class Actor:
    """One incarnation, running as a task of the test's event loop."""

    def __init__(
        self,
        ring: Ring,
        name: str,
        *,
        engine: FakeEngine | None = None,
        run: dict[str, Any] | None = None,
        reward: str | None = None,
        wrap: Callable[[Any], Any] = lambda client: client,
        kind: type[ActorLoop] = ActorLoop,
        environments: Sequence[EnvironmentSource] = (),
        give_up_s: float = 20.0,
        group_wait_s: float = 20.0,
        tokenizer: Tokenizer | None = None,
        **actors: Any,
    ) -> None:
        self.engine = engine or FakeEngine(solve)
        self.engine.version = FIRST
        defaults = {"max_concurrent_episodes": 16, "heartbeat_s": 0.1, "snapshot_s": 0.05}
        self.settings = Settings(
            run=RunSettings(
                name=RUN,
                model="init",
                group_size=GROUP,
                reward=reward,
                reward_timeout_s=5,
                **{"max_completion_tokens": 64, **(run or {})},
            ),
            actors=ActorSettings(**{**defaults, **actors}),
        )
        self.weights = FakeWeights()
        self.gate = SwapGate(hold_s=0.2)
        self.client = wrap(ring.client(name))
        self.loop = kind(
            hello(name, capacity=self.settings.actors.slots),
            run=self.settings.run,
            actors=self.settings.actors,
            max_message_bytes=self.settings.broker.max_message_bytes,
            broker=self.client,
            engine=self.engine,
            weights=self.weights,
            gate=self.gate,
            prepare=self._prepare,
            give_up_s=give_up_s,
            group_wait_s=group_wait_s,
        )
        self.name = name
        self.tokenizer = tokenizer or CharacterTokenizer()
        self.environments = environments or [EnvironmentSource(Calculator, is_shared=True)]
        self.life = asyncio.create_task(self.loop.run())

    async def _prepare(self) -> EpisodeTools:
        run, actors = self.settings.run, self.settings.actors
        limit_s = actors.environment_timeout_s
        maker = EpisodeMaker(self.tokenizer, run, self.name, limit_s=limit_s)
        rewards = [
            RewardPool(alone, actors) if alone.reward else None
            for alone in run.by_environment.values()
        ]
        for pool, source in zip(rewards, self.environments, strict=True):
            if pool is not None:  # as an actor does, which so learns how it is called
                begun: Any = source.make().begin(0, 0, held_out=False)
                item = await begun if inspect.isawaitable(begun) else begun
                with suppress(RewardError):
                    await pool.try_out(item)
        return EpisodeTools(maker, self.environments, rewards)

    async def end(self, timeout_s: float = 10.0) -> None:
        async with asyncio.timeout(timeout_s):
            await self.life


class KilledLoop(ActorLoop):
    """A process that is killed sends nothing more: cancel its task."""

    async def _leave(self, tools: EpisodeTools | None, *, has_failed: bool) -> None:
        pass
