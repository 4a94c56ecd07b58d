"""The lag of a version in the learner's history, forks included."""

from __future__ import annotations

import pytest

from buffer.operations.values import StaleMask
from buffer.record.episode import PolicyVersion
from learner.data.policy_lag import mask_stale, oldest_lag, policy_lags, token_lags
from tests.learner.support.made_episodes import make_episode

# Lineage 1 ran to step 12; 2 forked from it at 10 and ran to 14; 3 forked at 11.
LINEAGES = {1: 0, 2: 10, 3: 11}


@pytest.mark.parametrize(
    ("version", "step", "lineage", "expected"),
    [
        ((3, 19), 20, 3, 0),  # the policy that trains the batch
        ((3, 17), 20, 3, 2),
        ((1, 8), 12, 3, 3),  # an ancestor: the history is one
        ((1, 10), 11, 2, 0),  # the checkpoint itself, under its old name
        ((1, 12), 11, 2, 2),  # two steps into a branch that was abandoned at 10
        ((1, 12), 13, 2, 4),  # and two more on the branch that was kept
        ((2, 14), 12, 3, 3),  # abandoned at 11
        ((1, 12), 12, 3, 3),  # lineage 3 contains lineage 1 up to 10 only
    ],
)
def test_lag_counts_the_steps_between_two_versions(
    version: tuple[int, int], step: int, lineage: int, expected: int
) -> None:
    first, newest = PolicyVersion(1, 0), PolicyVersion(3, 19)
    versions = [first, PolicyVersion(*version), newest]

    lags = policy_lags(versions, step=step, lineage=lineage, lineages=LINEAGES)

    assert lags.tolist()[1] == expected


def test_every_token_has_the_lag_of_its_span() -> None:
    versions = [(PolicyVersion(1, 2), 0), (PolicyVersion(1, 4), 2)]
    episode = make_episode(completion=[8] * 5, versions=versions)

    assert token_lags(episode, 6, 1, {1: 0}).tolist() == [3, 3, 1, 1, 1]


def test_the_oldest_trained_token_decides() -> None:
    versions = [(PolicyVersion(1, 0), 0), (PolicyVersion(1, 4), 2)]
    masked = make_episode(completion=[8] * 4, mask=[0, 0, 1, 1], versions=versions)
    trained = make_episode(completion=[8] * 4, versions=versions)

    assert oldest_lag(masked, 6, 1, {1: 0}) == 1
    assert oldest_lag(trained, 6, 1, {1: 0}) == 5


@pytest.mark.parametrize(
    ("max_lag", "trained"),
    [(0, [0, 0, 0, 0, 0, 1]), (2, [0, 0, 0, 1, 0, 1]), (4, [0, 1, 0, 1, 0, 1])],
)
def test_a_token_at_the_bound_is_trained_and_the_next_older_one_is_context(
    max_lag: int, trained: list[int]
) -> None:
    # An actor with older weights went on from the fifth token.
    steps = [(0, 0), (1, 1), (3, 3), (0, 4), (5, 5)]
    versions = [(PolicyVersion(1, step), start) for step, start in steps]
    episode = make_episode(
        completion=[8] * 6, mask=[1, 1, 0, 1, 1, 1], versions=versions, reward=0.5
    )

    [masked] = mask_stale([episode], StaleMask(1, max_lag, 99), step=6, lineages={1: 0}, reused=())
    [reused] = mask_stale([episode], StaleMask(1, 99, max_lag), step=6, lineages={1: 0}, reused={0})
    [unmasked] = mask_stale([episode], None, step=6, lineages={1: 0}, reused=())

    assert masked.completion.loss_mask.tolist() == trained
    assert reused.completion.loss_mask.tolist() == trained
    assert unmasked is episode
    assert masked.completion.token_ids is episode.completion.token_ids
    assert (masked.reward, masked.completion.versions) == (0.5, episode.completion.versions)
