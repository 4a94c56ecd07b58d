"""`benchmarks.learner`: arms that compute the same, and which way a ratio points."""

from __future__ import annotations

import pytest
import torch

from benchmarks.learner.__main__ import SHORT, kept_bytes, output_layer_arms, ratios, step_arms
from benchmarks.learner.padded_loop import arrival_order, score, score_in_chunks, similar_lengths
from benchmarks.learner.workload import GROUP_SIZE, MOST_TOKENS, make_episodes

pytestmark = pytest.mark.slow


def test_every_ratio_is_larger_where_ours_is_better() -> None:
    names = [arm.name for arm in (*step_arms(SHORT), *output_layer_arms())]
    arms = {
        name: {"cpu_s": 1.0 if name.startswith("ours") else 2.0, "peak_mib": 4.0} for name in names
    }
    for name in names:
        arms[name]["peak_mib"] /= 2 if name.startswith("ours") else 1

    found = ratios(arms | {"activations": kept_bytes()})

    assert {"over_plain_loop", "over_before", "output_layer_memory_fewer_32k"} <= set(found)
    assert found.pop("activation_memory_fewer") > 20
    assert set(found.values()) == {2.0}


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
