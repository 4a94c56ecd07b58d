"""Episodes with branches: trained as the rows of their paths are, each token once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from buffer.record.episode import Branch, Episode, stretches
from configs.settings import AlgorithmSettings, CriticSettings
from learner.algorithm.microbatch import Microbatch
from learner.algorithm.reference_kl import rewards_to_go
from learner.algorithm.token_advantages import token_advantages
from learner.data import batch
from learner.data.batch import BatchPlan, pack, plan_batch
from learner.model import attention
from learner.model.policy import Policy
from tests.learner.support.exact_gradients import (
    EXACT,
    FAMILIES,
    PRECISIONS,
    SETTINGS,
    Found,
    assert_equal,
    make_model,
    packed,
    packed_alone,
    train,
)
from tests.learner.support.made_branches import (
    before,
    random_branched_episodes,
    tokens_to_train,
    trained_tokens,
)
from tests.learner.support.made_episodes import make_episode
from tests.learner.support.padded import PaddedPolicy
from tests.learner.support.varlen import varlen_by_its_documentation

EPISODES = random_branched_episodes(10, seed=2)


def _plan(episodes: list[Episode], settings: AlgorithmSettings = SETTINGS) -> BatchPlan:
    return plan_batch(
        1, episodes, ranks=1, settings=settings, max_completion_tokens=12, microbatch_tokens=1000
    )


def _pack(plan: BatchPlan, episodes: list[Episode]) -> list[Microbatch]:
    return pack(plan, episodes, settings=SETTINGS, lineages={1: 0}, lineage=1)


def _written_out(family: str, dtype: torch.dtype) -> Found:
    microbatches = packed_alone(EPISODES)
    assert all(microbatch.sequences.seen is None for microbatch in microbatches)
    return train(PaddedPolicy(make_model(family, dtype)), microbatches)


def _packed(family: str, dtype: torch.dtype, microbatch_tokens: int = 1000) -> Found:
    microbatches = packed(EPISODES, microbatch_tokens)
    return train(Policy(make_model(family, dtype), temperature=1.0), microbatches)


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_tree_equals_its_paths_written_out(
    family: str, dtype: torch.dtype, tolerance: float
) -> None:
    rows = _written_out(family, dtype)

    for microbatch_tokens in (1000, 20):
        assert_equal(_packed(family, dtype, microbatch_tokens), rows, tolerance)

    assert all(float(gradient.abs().max()) > 0 for gradient in rows[1])


def test_the_kernel_for_several_lengths_is_given_whole_paths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "has_varlen_kernel", lambda query, softcap: softcap is None)
    monkeypatch.setattr(attention, "varlen_attn", varlen_by_its_documentation)

    found = _packed("gemma3_text", torch.float64)

    assert_equal(found, _written_out("gemma3_text", torch.float64), EXACT)


def _to_the_parent_before(right: Any) -> Any:
    """Branches follow one token less than they did."""

    def stretches(branches: tuple[Branch, ...], length: int) -> Any:
        moved = [Branch(b.start, b.parent and b.parent - 1) for b in branches]
        return right(moved, length)

    return stretches


def _all_behind_the_prompt(right: Any) -> Any:
    return lambda branches, length: [s._replace(parent=0) for s in right(branches, length)]


def _roots_behind_the_prompt(right: Any) -> Any:
    return lambda branches, length: [
        s._replace(parent=s.parent or 0) for s in right(branches, length)
    ]


def _as_one_row(right: Any) -> Any:
    return lambda _branches, length: right((), length)


@pytest.mark.parametrize(
    "wrong", [_to_the_parent_before, _all_behind_the_prompt, _roots_behind_the_prompt, _as_one_row]
)
def test_a_wrong_tree_is_found(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = _written_out("qwen3", torch.float64)

    monkeypatch.setattr(batch, "stretches", wrong(stretches))

    with pytest.raises(AssertionError):
        assert_equal(_packed("qwen3", torch.float64), rows, EXACT)


@pytest.mark.parametrize("seed", range(20))
def test_each_token_is_run_once_and_has_its_own_path(seed: int) -> None:
    episodes = random_branched_episodes(8, seed=seed)

    (microbatch,) = _pack(_plan(episodes), episodes)

    sequences = microbatch.sequences
    prompts = {tuple(episode.prompt_ids) for episode in episodes}
    logs = sum(len(episode.completion.token_ids) for episode in episodes)
    assert len(sequences.token_ids_T) == logs + sum(map(len, prompts))
    assert trained_tokens(microbatch) == Counter(
        facts for episode in episodes for facts in tokens_to_train(episode)
    )


@pytest.mark.parametrize("aggregation", ["token", "sequence", "sequence_sum", "dr_grpo"])
def test_an_episode_counts_once_however_many_branches_it_has(aggregation: str) -> None:
    settings = AlgorithmSettings.model_validate({"aggregation": aggregation})
    plain = [
        replace(episode, completion=replace(episode.completion, branches=()))
        for episode in EPISODES
    ]
    weights, advantages = [], []
    for episodes in (EPISODES, plain):
        plan = _plan(episodes, settings)
        (microbatch,) = pack(plan, episodes, settings=settings, lineages={1: 0}, lineage=1)
        order = microbatch.behaviour_logprobs_N.argsort()  # no two are equal
        weights.append(microbatch.weights_N[order].tolist())
        advantages.append(microbatch.advantages_N[order].tolist())

    assert weights[0] == weights[1]
    assert advantages[0] == advantages[1]


def _one_by_one(episode: Episode, values: dict[int, float], gamma: float) -> dict[int, float]:
    """Return what each trained token leads to: the reward where its trajectory ends, discounted."""
    follows, mask = before(episode), episode.completion.loss_mask
    returns: dict[int, float] = {}
    for token in np.flatnonzero(mask).tolist():
        steps, reached, total = 0, token, values[token]
        while reached in follows:
            reached = follows.index(reached)  # the first that follows
            steps += int(mask[reached])
            total += gamma**steps * values[reached] * int(mask[reached])
        returns[token] = total + gamma**steps * episode.reward
    return returns


@pytest.mark.parametrize("seed", range(10))
def test_a_trajectory_goes_on_with_the_first_token_that_follows(seed: int) -> None:
    """With values of 0 and lambda 1 an advantage is the discounted rewards to come."""
    episodes = random_branched_episodes(6, seed=seed)
    (microbatch,) = _pack(_plan(episodes), episodes)
    rewards_N = torch.linspace(-1, 1, len(microbatch.indices_N))
    logprobs = microbatch.behaviour_logprobs_N.tolist()
    reward_of = dict(zip(logprobs, rewards_N.tolist(), strict=True))
    settings = CriticSettings(kind="head", gamma=0.9, lam=1.0)

    zeros_N = torch.zeros_like(rewards_N)
    discounted = token_advantages(
        microbatch, zeros_N, zeros_N, name="gae", settings=settings, rewards_N=rewards_N
    ).advantages_N.tolist()
    to_go = rewards_to_go(microbatch, rewards_N).tolist()

    for gamma, found in ((0.9, discounted), (1.0, to_go)):
        found_of = dict(zip(logprobs, found, strict=True))
        for episode in episodes:
            recorded = episode.completion.behaviour_logprobs.tolist()
            values = {t: reward_of.get(x, 0.0) for t, x in enumerate(recorded)}
            for token, expected in _one_by_one(episode, values, gamma).items():
                assert found_of[recorded[token]] == pytest.approx(expected, abs=1e-5)


def test_turns_of_two_conversations_are_two_trajectories() -> None:
    """A sub-agent speaks between two turns; the first conversation goes on where it was."""
    episode = make_episode(
        completion=[8, 9, 3, 4, 5, 6], mask=[1, 1, 0, 1, 1, 1], branches=[(2, None), (4, 2)]
    )

    (microbatch,) = _pack(_plan([episode]), [episode])

    assert microbatch.trajectories_N is not None
    assert microbatch.trajectories_N.tolist() == [0, 0, 1, 0, 0]
