"""Plans and microbatches: every cut of a batch trains the same batch."""

from __future__ import annotations

import pytest
import torch

from buffer.record.episode import Episode
from configs.errors import RecordError
from configs.settings import AlgorithmSettings
from learner.algorithm.microbatch import Microbatch, PreparedMicrobatch, empty_microbatch
from learner.data.batch import BatchPlan, pack, plan_batch
from learner.model.ranks import Ranks
from learner.training.divergence import DivergenceMeter
from learner.training.step import accumulate
from tests.learner.support.made_episodes import make_episode, num_tokens, random_group_episodes
from tests.learner.support.tiny_policy import tiny_policy

SETTINGS = AlgorithmSettings(entropy_bonus=0.01)


def _plan(
    episodes: list[Episode],
    *,
    ranks: int = 1,
    num_minibatches: int = 1,
    microbatch_tokens: int = 16384,
) -> BatchPlan:
    return plan_batch(
        1,
        episodes,
        ranks=ranks,
        settings=AlgorithmSettings(),
        max_completion_tokens=8,
        microbatch_tokens=microbatch_tokens,
        num_minibatches=num_minibatches,
    )


def _pack(
    plan: BatchPlan, episodes: list[Episode], settings: AlgorithmSettings = SETTINGS
) -> list[Microbatch]:
    return pack(plan, episodes, settings=settings, lineages={1: 0}, lineage=1)


def test_advantages_stay_within_their_group() -> None:
    rewards = [0.0, 1.0, 5.0, 5.0]
    episodes = [make_episode(i, group_id=i // 2, reward=r) for i, r in enumerate(rewards)]

    advantages = [row.advantage for row in _plan(episodes).rows]

    assert advantages == pytest.approx([-0.707, 0.707, 0.0, 0.0], abs=1e-3)


def test_counts_are_of_trained_tokens() -> None:
    episodes = [
        make_episode(0, completion=[8, 9, 8], mask=[1, 0, 1]),
        make_episode(1, completion=[8], mask=[0]),
    ]

    (counts,) = _plan(episodes).counts

    assert (counts.tokens, counts.episodes, counts.max_completion_tokens) == (2, 1, 8)


def _loads(plan: BatchPlan, episodes: list[Episode], minibatch: int, ranks: int) -> list[int]:
    """Tokens that each rank runs."""
    loads = []
    for rank in range(ranks):
        ids = set(plan.task_ids_of(rank))
        packed = _pack(plan, [episode for episode in episodes if episode.task_id in ids])
        run = [m for m in packed if m.minibatch == minibatch and len(m.indices_N)]
        loads.append(sum(len(m.sequences.token_ids_T) for m in run))
    return loads


def test_ranks_get_like_numbers_of_tokens() -> None:
    episodes = random_group_episodes(8, 8)

    loads = _loads(_plan(episodes, ranks=3), episodes, 0, 3)

    assert max(loads) - min(loads) <= max(num_tokens(episode) for episode in episodes)


def test_a_minibatch_has_whole_groups_and_its_own_counts() -> None:
    episodes = random_group_episodes(5, 4)
    plan = _plan(episodes, ranks=2, num_minibatches=2)

    by_minibatch = [
        [e for e, row in zip(episodes, plan.rows, strict=True) if row.minibatch == m]
        for m in (0, 1)
    ]

    assert [sorted({e.group_id for e in own}) for own in by_minibatch] == [[0, 1, 2], [3, 4]]
    for own, counts in zip(by_minibatch, plan.counts, strict=True):
        assert counts.episodes == len(own)
        assert counts.tokens == sum(int(e.completion.loss_mask.sum()) for e in own)
    for minibatch, counts in enumerate(plan.counts):
        packed = [m for m in _pack(plan, episodes) if m.minibatch == minibatch]
        assert sum(float(m.weights_N.sum()) for m in packed) == pytest.approx(1)
        assert sum(len(m.weights_N) for m in packed) == counts.tokens


def test_each_minibatch_is_dealt_evenly_over_the_ranks() -> None:
    episodes = random_group_episodes(8, 8)
    plan = _plan(episodes, ranks=2, num_minibatches=4)

    for minibatch in range(4):
        own = [e for e, row in zip(episodes, plan.rows, strict=True) if row.minibatch == minibatch]
        loads = _loads(plan, episodes, minibatch, 2)
        # Less than half of them, were each prompt repeated.
        assert 0 < min(loads) <= max(loads) <= sum(num_tokens(episode) for episode in own) / 2


def test_an_episode_without_a_trained_token_moves_the_baseline_and_has_no_row() -> None:
    episodes = [
        make_episode(0, reward=1.0),
        make_episode(1, reward=0.0),
        make_episode(2, reward=1.0, mask=[0, 0]),
    ]

    plan = _plan(episodes)

    assert [row.task_id for row in plan.rows] == [0, 1]
    high, low = (row.advantage for row in plan.rows)
    assert low == pytest.approx(-2 * high), "less a mean of 2/3, not of 1/2"


def test_a_minibatch_without_a_trained_token_takes_part_in_nothing_but_collectives() -> None:
    episodes = [make_episode(i, group_id=i // 2, mask=[i // 2, i // 2]) for i in range(4)]
    plan = _plan(episodes, ranks=2, num_minibatches=2)

    for rank in range(2):
        own = {*plan.task_ids_of(rank)}
        first, second = _pack(plan, [e for e in episodes if e.task_id in own])
        assert (first.minibatch, second.minibatch) == (0, 1)
        assert (len(first.indices_N), len(second.indices_N)) == (0, 2)


def test_a_plan_survives_the_wire() -> None:
    plan = _plan(random_group_episodes(3, 4), ranks=2, num_minibatches=2)

    assert BatchPlan.decode(plan.encode()) == plan


@pytest.mark.parametrize("num_groups", [8, 64])
@pytest.mark.parametrize("microbatch_tokens", [16, 100, 1000])
def test_no_token_is_run_that_is_not_an_episodes(num_groups: int, microbatch_tokens: int) -> None:
    """And a prompt once a microbatch: with a large one, once."""
    episodes = random_group_episodes(num_groups, 8)
    plan = _plan(episodes, microbatch_tokens=microbatch_tokens)

    packed = _pack(plan, episodes)

    run = sum(len(microbatch.sequences.token_ids_T) for microbatch in packed)
    prompts = {
        (row.microbatch, tuple(e.prompt_ids)) for row, e in zip(plan.rows, episodes, strict=True)
    }
    completions = sum(len(episode.completion.token_ids) for episode in episodes)
    assert run == completions + sum(len(prompt) for _, prompt in prompts)
    assert len(packed) > 1 or len(prompts) <= num_groups


def test_every_rank_has_as_many_microbatches_as_any_other() -> None:
    episodes = random_group_episodes(3, 3)
    plan = _plan(episodes, ranks=4, num_minibatches=2, microbatch_tokens=12)
    own = {row.task_id: row.rank for row in plan.rows}

    packed = [_pack(plan, [e for e in episodes if own[e.task_id] == rank]) for rank in range(4)]

    minibatches = [[microbatch.minibatch for microbatch in of_rank] for of_rank in packed]
    assert minibatches == [minibatches[0]] * 4
    assert {0, 1} == set(minibatches[0])
    lengths = [len(m.sequences.token_ids_T) for of_rank in packed for m in of_rank]
    assert max(lengths) <= 12 and min(lengths) == 1  # an empty one has one token


def test_packed_tokens_are_those_of_the_episodes() -> None:
    episode = make_episode(
        0, prompt=[3, 4], completion=[5, 6, 7], logprobs=[-1, 0, -2], mask=[1, 0, 1]
    )

    (microbatch,) = _pack(_plan([episode]), [episode])

    assert microbatch.sequences.token_ids_T.tolist() == [3, 4, 5, 6, 7]
    assert microbatch.indices_N.tolist() == [2, 4]
    assert microbatch.behaviour_logprobs_N.tolist() == [-1, -2]
    assert microbatch.weights_N.tolist() == [0.5, 0.5]
    assert microbatch.lags_N.tolist() == [0, 0]


def test_tokens_have_the_number_of_their_episode_and_episodes_their_reward() -> None:
    episodes = [
        make_episode(0, completion=[5, 6, 7], mask=[1, 0, 1], reward=0.25),
        make_episode(1, completion=[5, 6, 7], mask=[0, 1, 0], reward=0.5),
        make_episode(2, completion=[5, 6, 7, 8], reward=1.0),
    ]

    (microbatch,) = _pack(_plan(episodes), episodes)

    bounds = microbatch.sequences.bounds[2:]  # behind the prompt
    numbers = [0, 0, 1, 2, 2, 2, 2]
    assert microbatch.episodes_N.tolist() == numbers
    assert torch.bucketize(microbatch.indices_N, bounds, right=True).tolist() == numbers
    assert microbatch.rewards_B.tolist() == [0.25, 0.5, 1.0]


def test_only_the_same_tokens_are_one_prompt_whatever_the_group() -> None:
    episodes = [
        make_episode(0, group_id=0, prompt=[5, 6], completion=[8, 9, 9]),
        make_episode(1, group_id=0, prompt=[5, 7], completion=[8, 9]),
        make_episode(2, group_id=1, prompt=[5, 6], completion=[4]),
    ]

    (microbatch,) = _pack(_plan(episodes), episodes)

    sequences = microbatch.sequences
    assert sequences.token_ids_T.tolist() == [5, 6, 5, 7, 8, 9, 4, 8, 9, 9]
    assert sequences.positions_T.tolist() == [0, 1, 0, 1, 2, 3, 2, 2, 3, 4]
    assert sequences.before_T.tolist() == [0, 0, 2, 2, 3, 4, 1, 1, 7, 8]
    assert sequences.seen is not None
    assert sequences.seen.places.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 6, 0, 1, 7, 8, 9]
    assert sequences.seen.lengths == (2, 4, 3, 5)


def test_facts_of_a_token_are_its_own_episodes() -> None:
    """The same with prompts together and apart."""
    episodes = random_group_episodes(4, 4)
    found = []
    for microbatch_tokens in (1000, 1):
        plan = _plan(episodes, microbatch_tokens=microbatch_tokens)
        facts: list[tuple[float, ...]] = []
        for m in _pack(plan, episodes):
            columns = [
                m.behaviour_logprobs_N,  # no two are equal
                m.sequences.token_ids_T[m.indices_N],
                m.sequences.token_ids_T[m.sequences.before_T[m.indices_N]],
                m.sequences.positions_T[m.indices_N],
                m.advantages_N,
                m.weights_N,
                m.lags_N,
                m.rewards_B[m.episodes_N],
            ]
            facts += zip(*(column.tolist() for column in columns), strict=True)
        found.append(sorted(facts))

    assert found[0] == found[1]


def test_an_episode_outside_the_plan_is_refused() -> None:
    with pytest.raises(RecordError, match="episode 7 must be in the plan of batch 1"):
        _pack(_plan([make_episode(0)]), [make_episode(7)])


def _loss_and_gradient(
    settings: AlgorithmSettings, microbatch_tokens: int, ranks: Ranks
) -> tuple[float, list[torch.Tensor]]:
    episodes = random_group_episodes(6, 4)
    policy = tiny_policy()
    meter = DivergenceMeter(settings, ranks.device)
    loss = 0.0
    plan = _plan(episodes, microbatch_tokens=microbatch_tokens)
    microbatches = _pack(plan, episodes, settings)
    for microbatch in [*microbatches, empty_microbatch()]:
        loss += float(accumulate(policy, PreparedMicrobatch(microbatch), meter, settings))
    return loss, [parameter.grad for parameter in policy.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("aggregation", ["token", "sequence", "dr_grpo"])
def test_loss_and_gradient_do_not_depend_on_the_cut(ranks: Ranks, aggregation: str) -> None:
    settings = AlgorithmSettings.model_validate({"aggregation": aggregation, "entropy_bonus": 0.01})

    loss, gradient = _loss_and_gradient(settings, 16384, ranks)
    cut_loss, cut_gradient = _loss_and_gradient(settings, 30, ranks)

    assert cut_loss == pytest.approx(loss, abs=1e-5)
    assert max(float(g.abs().max()) for g in gradient) > 1e-3
    for ours, expected in zip(cut_gradient, gradient, strict=True):
        assert torch.allclose(ours, expected, atol=1e-5)
