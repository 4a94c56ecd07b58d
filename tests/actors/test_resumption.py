"""Invariant I20: what is continued is distributed as what was never interrupted.

Ten thousand episodes of a tiny model by the torch engine, killed at random tokens. The control is
the other design, restarting: it must show the shift towards short episodes that theory predicts, or
this test could not see one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from actors.chat import Prompt, text_of
from actors.engine.engine import Delta, Engine
from actors.engine.torch_engine import TorchOptions, torch_engine
from actors.environments.base import Score, Segment, Step
from actors.environments.calls import drive
from actors.episodes.maker import EpisodeMaker
from actors.episodes.rollout import Rollout
from broker.protocol.messages import Lease, TaskSpec
from buffer.record.codec import encode_completion
from buffer.record.episode import PolicyVersion, VersionSpan
from configs.settings import RunSettings
from tests.actors.support.tiny_model import make_model

pytestmark = pytest.mark.slow

EPISODES = 10_000
LIMIT = 24
STOP = 1
HAZARD = 1 / 20  # kills per token: most episodes meet one
ALPHA = 1e-3  # of a false alarm, for each of the tests below
SPEC = TaskSpec(group_id=0, index=0, seed=0, purpose="train", temperature=1.0)


class Numbers:
    """Tokens are their numbers; token 1 ends a turn."""

    stop_token_ids = (STOP,)

    def encode_prompt(self, prompt: Prompt, tools: str = "") -> tuple[int, ...]:
        return self.encode_observation(text_of(prompt))

    def encode_observation(self, text: Prompt, *, is_open: bool = False) -> tuple[int, ...]:
        return tuple(int(word) for word in text_of(text).split())

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))


class OneTurn:
    """An environment and its only conversation: every text is an answer."""

    prompt = "5 6 7"
    answer = None
    demonstration: tuple[Segment, ...] = ()

    def begin(self, index: int, seed: int, *, held_out: bool) -> OneTurn:
        return self

    def describe(self) -> str:
        return "one turn"

    def step(self, text: str) -> Step:
        return Step()

    def score(self) -> Score:
        return Score(0.0)


@dataclass
class Arm:
    """Finished episodes of one way to treat kills."""

    lengths: list[int]
    tokens: list[int]
    """One of each episode, at a place that is drawn evenly: so they are independent."""
    kills: int = 0


class Sampler:
    """Makes episodes as an actor does, and kills its actor at random tokens."""

    def __init__(self, engine: Engine) -> None:
        run = RunSettings(model="-", max_completion_tokens=LIMIT)
        self._engine = engine
        self._maker = EpisodeMaker(Numbers(), run, "actor")
        self._fence = 0

    async def arm(self, *, hazard: float, resumes: bool, seed: int) -> Arm:
        """Sample all episodes."""
        dice = np.random.default_rng(seed)
        arm = Arm([], [])
        running: dict[str, tuple[Rollout, bool]] = {}
        leases = [Lease(i, 0, SPEC, 0) for i in range(EPISODES)]
        self._submit(leases, running, dice, hazard)
        while running:
            again = []
            for delta in await self._engine.deltas():
                rollout, dies = running[delta.request_id]
                if delta.finish_reason is None:
                    rollout.append_delta(delta)
                    continue
                del running[delta.request_id]
                if not (dies and delta.finish_reason == "length"):
                    rollout.append_delta(delta)
                    token_ids = rollout.completion().token_ids.tolist()
                    arm.lengths.append(len(token_ids))
                    arm.tokens.append(token_ids[dice.integers(len(token_ids))])
                    continue
                arm.kills += 1
                rollout.append_delta(replace(delta, finish_reason=None))
                again.append(_next_lease(rollout) if resumes else structs.replace(rollout.lease))
            self._submit(again, running, dice, hazard)
        return arm

    def _submit(
        self,
        leases: list[Lease],
        running: dict[str, tuple[Rollout, bool]],
        dice: np.random.Generator,
        hazard: float,
    ) -> None:
        requests = []
        for lease in leases:
            self._fence += 1
            rollout = drive(
                self._maker.begin_episode(structs.replace(lease, fence=self._fence), OneTurn())
            )
            assert not rollout.restarted
            request = rollout.request()
            lives = int(dice.geometric(hazard)) if hazard else LIMIT
            if lives < request.max_tokens:
                request = replace(request, max_tokens=lives)
            running[request.request_id] = (rollout, lives < LIMIT - rollout.length)
            requests.append(request)
        self._engine.submit(requests)


def _next_lease(rollout: Rollout) -> Lease:
    """What the broker gives the next actor: the tokens of the one that died."""
    chunk = encode_completion(rollout.completion())
    return structs.replace(rollout.lease, length=rollout.length, chunks=(chunk,))


@pytest.fixture(scope="module")
def arms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Arm]:
    folder = tmp_path_factory.mktemp("resumption")
    return asyncio.run(_sample_all(folder))


async def _sample_all(folder: Path) -> dict[str, Arm]:
    # This one stops after the bare prompt in a third of all cases, and seldom later: an actor that
    # forgot what an episode already has would show.
    model = make_model(layers=1, seed=49)
    model.model.norm.weight.data.mul_(2.5)
    model.save_pretrained(folder)
    engine = torch_engine(TorchOptions(str(folder), max_model_len=64, max_concurrent=512, seed=1))
    await engine.start()
    sampler = Sampler(engine)
    try:
        return {
            "whole": await sampler.arm(hazard=0.0, resumes=True, seed=1),
            "resumed": await sampler.arm(hazard=HAZARD, resumes=True, seed=2),
            "restarted": await sampler.arm(hazard=HAZARD, resumes=False, seed=3),
        }
    finally:
        await engine.close()


def test_kills_are_many_enough_to_be_seen(arms: dict[str, Arm]) -> None:
    assert arms["whole"].kills == 0
    assert arms["resumed"].kills > EPISODES / 4
    assert all(len(arm.lengths) == EPISODES for arm in arms.values())


def test_resumed_episodes_are_as_long_as_uninterrupted_ones(arms: dict[str, Arm]) -> None:
    distance = _ks_distance(_cumulated(arms["whole"].lengths), _cumulated(arms["resumed"].lengths))

    assert distance < _ks_bound(EPISODES, EPISODES)


def test_resumed_episodes_have_the_tokens_of_uninterrupted_ones(arms: dict[str, Arm]) -> None:
    assert _chi_square_is_small(arms["whole"].tokens, arms["resumed"].tokens)


def test_restarting_would_shorten_episodes_as_predicted(arms: dict[str, Arm]) -> None:
    """An episode of length n survives its first n - 1 tokens with probability (1 - h)^(n - 1)."""
    whole, restarted = _cumulated(arms["whole"].lengths), _cumulated(arms["restarted"].lengths)
    lengths = np.arange(LIMIT + 1)
    shares = np.bincount(arms["whole"].lengths, minlength=LIMIT + 1) * (1 - HAZARD) ** lengths
    predicted = np.cumsum(shares) / shares.sum()

    assert _ks_distance(predicted, restarted) < _ks_bound(EPISODES, EPISODES)
    assert _ks_distance(whole, restarted) > 3 * _ks_bound(EPISODES, EPISODES)


def _cumulated(lengths: list[int]) -> np.ndarray:
    """Share of episodes with at most n tokens, for n = 0 to LIMIT. Shape [LIMIT + 1]."""
    return np.cumsum(np.bincount(lengths, minlength=LIMIT + 1)) / len(lengths)


def _ks_distance(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one - other).max())


def _ks_bound(n: int, m: int) -> float:
    """Two-sample Kolmogorov–Smirnov: sqrt(-ln(alpha / 2) / 2 * (n + m) / (n m))."""
    return float(np.sqrt(-np.log(ALPHA / 2) / 2 * (n + m) / (n * m)))


def _chi_square_is_small(one: list[int], other: list[int]) -> bool:
    """Homogeneity of two samples of one size; critical value by Wilson and Hilferty (1931)."""
    counts = np.array([np.bincount(sample, minlength=64) for sample in (one, other)])
    counts = counts[:, counts.sum(0) >= 10]
    statistic = ((counts[0] - counts[1]) ** 2 / counts.sum(0)).sum()
    freedom = counts.shape[1] - 1
    z = 3.09  # of the normal distribution at 1 - ALPHA
    spread = 2 / (9 * freedom)
    return bool(statistic < freedom * (1 - spread + z * np.sqrt(spread)) ** 3)


class Live(OneTurn):
    """An environment that cannot repeat what it answered."""

    can_replay = False


def test_an_episode_that_cannot_be_replayed_restarts_and_says_so() -> None:
    run = RunSettings(model="-", max_completion_tokens=LIMIT)
    maker = EpisodeMaker(Numbers(), run, "actor")
    begun = drive(maker.begin_episode(Lease(1, 1, SPEC, 0), Live()))
    begun.append_delta(
        Delta("1.1.0", (9, 8), (-1.0, -1.0), (VersionSpan(PolicyVersion(1, 0), 0),), None)
    )

    again = drive(maker.begin_episode(_next_lease(begun), Live()))
    continued = drive(maker.begin_episode(_next_lease(begun), OneTurn()))

    assert (again.restarted, again.length) == (True, 0)
    assert (continued.restarted, continued.length) == (False, 2)
