"""Batches that nothing can be learned from: skipped, rolled back, and accounted for."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import learner.loop
from buffer import operations
from buffer.operations.values import Stats
from buffer.record.episode import PolicyVersion
from buffer.store import Store
from configs.errors import DivergedError
from configs.settings import Settings
from learner.algorithm.microbatch import Microbatch
from learner.model.ranks import Ranks
from learner.training.step import TrainedBatch, train_batch
from tests.learner.support.ring_in_process import LifeEnded, RingInProcess
from tests.learner.support.tiny_run import tiny_settings

Poisons = Callable[[Collection[int]], None]


@pytest.fixture
def poisons(monkeypatch: pytest.MonkeyPatch) -> Poisons:
    """Give the records of these batches log-probs of -10 000: no ratio to them is finite."""

    def poison(steps: Collection[int]) -> None:
        def train(
            policy: Any, optimizer: Any, step: int, microbatches: Sequence[Microbatch], **rest: Any
        ) -> TrainedBatch:
            if step in steps:
                microbatches = [
                    replace(each, behaviour_logprobs_N=each.behaviour_logprobs_N - 1e4)
                    for each in microbatches
                ]
            return train_batch(policy, optimizer, step, microbatches, **rest)

        monkeypatch.setattr(learner.loop, "train_batch", train)

    return poison


def _settings(folder: Path, **guards: object) -> Settings:
    # Without a truncation or a clip nothing stands between a ratio and the loss.
    settings = tiny_settings(
        folder,
        run={"groups_per_batch": 4, "group_size": 4, "steps": 8},
        algorithm={"correction": "none", "surrogate": "reinforce"},
    )
    tables = {**settings.model_dump(), "guards": {"max_skipped_in_a_row": 2, **guards}}
    return Settings.model_validate(tables)


def _metrics(ring: RingInProcess) -> list[dict[str, Any]]:
    text = (ring.settings.run.folder / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def _stats(url: str) -> Stats:
    with Store(url, "tiny") as store:
        return store.run(operations.stats())


def _are_equal(ring: RingInProcess, one: tuple[int, int], other: tuple[int, int]) -> bool:
    pair = (ring.shelf.history[PolicyVersion(*version)] for version in (one, other))
    return all(torch.equal(a, b) for a, b in zip(*pair, strict=True))


def test_weights_go_back_while_batches_go_on_and_every_task_is_accounted_for(
    redis_url: str, tmp_path: Path, ranks: Ranks, poisons: Poisons
) -> None:
    poisons({4, 5})
    ring = RingInProcess(_settings(tmp_path), redis_url, ranks)

    assert ring.live()

    assert _are_equal(ring, (1, 5), (1, 2)), "the checkpoint due at 4 waited, and 3 was undone"
    assert not _are_equal(ring, (1, 6), (1, 2))
    metrics = _metrics(ring)
    assert [line["step"] for line in metrics] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [line["skipped_steps"] for line in metrics] == [0, 0, 0, 1, 1, 0, 0, 0]
    assert [line["alerts"] for line in metrics[3:5]] == [["skipped"], ["skipped", "rollback"]]
    assert [line["learning_rate"] for line in metrics] == pytest.approx([1e-3] * 5 + [5e-4] * 3)
    batches = (ring.settings.run.folder / "batches.jsonl").read_text().splitlines()
    groups = [group for line in batches for group in json.loads(line)["group_ids"]]
    assert len(groups) == len(set(groups)) == 8 * 4
    summary = json.loads((ring.settings.run.folder / "summary.json").read_text())
    assert (summary["rollbacks"], summary["skipped_steps"], summary["skipped_for_loss"]) == (
        1,
        2,
        2,
    )
    stats = _stats(redis_url)
    assert stats.committed == 8 * 16
    ended = stats.committed + sum(stats.dropped.values()) + stats.dead + stats.cancelled
    assert stats.created == ended


@pytest.mark.slow
def test_a_life_that_ends_after_a_rollback_is_replayed_to_the_same_weights(
    redis_url: str, tmp_path: Path, ranks: Ranks, poisons: Poisons
) -> None:
    poisons({4, 5})
    ring = RingInProcess(_settings(tmp_path), redis_url, ranks)
    ring.shelf.end_life_at = 5
    with pytest.raises(LifeEnded):
        ring.live()

    assert ring.live()

    assert _are_equal(ring, (2, 3), (1, 3))
    assert _are_equal(ring, (2, 5), (1, 5))
    metrics = _metrics(ring)
    assert [line["step"] for line in metrics] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [line["alerts"] for line in metrics[3:6]] == [["skipped"], ["skipped", "rollback"], []]
    assert metrics[5]["learning_rate"] == pytest.approx(5e-4)
    assert _stats(redis_url).committed == 8 * 16


def test_rollbacks_go_further_back_and_end_with_an_error_for_people(
    redis_url: str, tmp_path: Path, ranks: Ranks, poisons: Poisons
) -> None:
    poisons(range(3, 9))
    settings = _settings(tmp_path, max_skipped_in_a_row=1, max_rollbacks=2)
    ring = RingInProcess(settings, redis_url, ranks)

    with pytest.raises(DivergedError, match=r"guards\.max_rollbacks = 2"):
        ring.live()

    assert _are_equal(ring, (1, 3), (1, 2))
    assert _are_equal(ring, (1, 4), (1, 0)), "no checkpoint before that of step 2: the beginning"
    assert PolicyVersion(1, 5) not in ring.shelf.history


def test_coefficients_that_follow_a_target_go_on_after_a_crash_as_if_there_had_been_none(
    redis_url: str, tmp_path: Path, ranks: Ranks
) -> None:
    settings = tiny_settings(
        tmp_path,
        run={"groups_per_batch": 4, "group_size": 4, "steps": 4},
        algorithm={"kl_coefficient": 0.1, "kl_target": 1e-6, "entropy_target": 9.0},
    )
    ring = RingInProcess(settings, redis_url, ranks)
    ring.shelf.end_life_at = 3
    with pytest.raises(LifeEnded):
        ring.live()

    assert ring.live()

    assert _are_equal(ring, (2, 3), (1, 3))
    metrics = _metrics(ring)
    assert metrics[0]["kl_pi_ref_k3"] == pytest.approx(0.0, abs=1e-6), "pi begins at the reference"
    assert [line["entropy_bonus"] for line in metrics] == pytest.approx([0, 0.005, 0.01, 0.015])
    # The first batch pays no KL yet, so the coefficient falls once; then pi has left.
    assert [line["kl_coefficient"] for line in metrics] == pytest.approx(
        [0.1, 0.098, 0.098 * 1.02, 0.098 * 1.02**2]
    )
