"""`benchmarks.learner`: arms that compute the same, and which way a ratio points."""

from __future__ import annotations

import pytest
import torch

from benchmarks.learner.__main__ import (
    SHORT,
    activation_arms,
    kept_bytes,
    output_layer_arms,
    ratios,
    step_arms,
    waiting,
)
from benchmarks.learner.padded_loop import arrival_order, score, score_in_chunks, similar_lengths
from benchmarks.learner.small import small_arms, small_batch, small_loop
from benchmarks.learner.workload import GROUP_SIZE, MOST_TOKENS, make_episodes
from tests.learner.support.forks import FORKS

pytestmark = pytest.mark.slow


def test_every_ratio_is_larger_where_ours_is_better() -> None:
    named = [*step_arms(SHORT), *output_layer_arms(), *activation_arms(SHORT), *small_arms(1)]
    arms = {arm.name: {"cpu_s": 2.0, "peak_mib": 4.0} for arm in named}
    for name in arms:
        if name.startswith(("ours", "in_forward", "checkpointed", "small_plain")):
            arms[name] = {"cpu_s": 1.0, "peak_mib": 2.0}
    arms["lockstep_8"] = {"took": 1.0, "least": 2.0}
    arms["save"] = {
        "synchronous_s": 2.0,
        "blocked_s": 1.0,
        "tokens_per_s": 2.0,
        "tokens_per_s_without": 1.0,
    }

    found = ratios(arms | {"activations": kept_bytes()})

    assert {"over_plain_loop", "over_before", "output_layer_memory_fewer_32k"} <= set(found)
    assert {"small_over_mkl", "small_over_sharded", "small_over_compiled"} <= set(found)
    assert {"over_before_best_long_prompts", "activation_time", "save_blocks_less"} <= set(found)
    assert found.pop("activation_memory_fewer") > 20
    assert set(found.values()) == {2.0}


def test_ranks_never_need_less_than_the_least_time() -> None:
    found = waiting(8, 64)

    assert 0 < found["least"] <= found["took"]


def test_chunks_of_the_arm_before_give_the_scores_of_full_logits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("benchmarks.learner.padded_loop.CHUNK_LOGITS", 40)
    weight_VD, states_ND = torch.randn(20, 4), torch.randn(7, 4)

    found = score_in_chunks(weight_VD, states_ND, torch.arange(7))

    for ours, full in zip(found, score(weight_VD, states_ND, torch.arange(7)), strict=True):
        torch.testing.assert_close(ours, full)


def test_both_cuts_take_every_row_once() -> None:
    episodes = make_episodes(3)
    lengths = [len(e.prompt_ids) + len(e.completion.token_ids) for e in episodes]

    for cut in (arrival_order, similar_lengths):
        assert sorted(row for rows in cut(lengths, 2048) for row in rows) == [*range(len(lengths))]
    assert len(episodes) == 3 * GROUP_SIZE
    assert max(len(e.completion.token_ids) for e in episodes) <= MOST_TOKENS


@pytest.mark.slow
def test_all_forms_of_a_small_step_train_alike() -> None:
    losses = {}
    for kind in ("plain", "mkl", "sharded"):
        with FORKS.Pool(1) as pool:  # a process joins one group of ranks
            losses[kind] = pool.apply(_loss_of, (kind,))

    assert losses["sharded"] == losses["plain"] != 0.0
    assert losses["mkl"] == pytest.approx(losses["plain"], abs=1e-6)


def _loss_of(kind: str) -> float:
    loss: float = small_loop(kind)(small_batch(0)).loss
    return loss
