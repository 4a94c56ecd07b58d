"""Whole runs that train groups again: they end, account, and a crash changes nothing."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import redis
import torch

from buffer import operations
from buffer.operations.keys import run_prefix
from buffer.record.episode import PolicyVersion
from buffer.store import Store
from learner.model.ranks import Ranks
from tests.learner.support.ring_in_process import LifeEnded, RingInProcess
from tests.learner.support.tiny_run import tiny_settings


def _lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


@pytest.mark.slow
def test_a_killed_learner_trains_the_same_groups_again(
    redis_url: str, tmp_path: Path, ranks: Ranks
) -> None:
    settings = tiny_settings(
        tmp_path,
        run={"groups_per_batch": 2, "steps": 8},
        replay={"capacity": 64, "fraction": 0.5, "max_reuse": 2, "max_lag": 6},
    )
    ring = RingInProcess(settings, redis_url, ranks)
    ring.shelf.end_life_at = 5  # trained and advanced; the checkpoint is of step 4
    with pytest.raises(LifeEnded):
        ring.live()

    assert ring.live()

    before, after = (ring.shelf.history[PolicyVersion(lineage, 5)] for lineage in (1, 2))
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    folder = settings.run.folder
    batches, metrics = _lines(folder, "batches.jsonl"), _lines(folder, "metrics.jsonl")
    new = [group for line in batches for group in line["group_ids"]]
    assert len(new) == len(set(new)) == 8 * 2
    again = Counter(group for line in batches for group in line["reused_group_ids"])
    assert again and set(again) <= set(new) and max(again.values()) <= 2
    assert metrics[4]["is_replay"] and metrics[4]["reused_groups"] == 2
    assert all(line["groups"] == 2 + line["reused_groups"] for line in metrics)
    assert all(line["policy_lag_max"] <= 6 for line in metrics)


def test_what_is_kept_is_gone_when_the_run_has_ended(
    redis_url: str, tmp_path: Path, ranks: Ranks
) -> None:
    # The checkpoint of step 4 waits for that of 2, which keeps groups that 5 and 6 train again.
    settings = tiny_settings(tmp_path, run={"steps": 6}, replay={"capacity": 64, "max_reuse": 9})

    assert RingInProcess(settings, redis_url, ranks).live()

    with Store(redis_url, "tiny") as store, redis.Redis.from_url(redis_url) as client:
        stats = store.run(operations.stats())
        assert (stats.kept_units, stats.reused_units, stats.kept_bytes) == (0, 0, 0)
        assert stats.committed == 6 * 2 * 4
        assert stats.accounted == stats.created
        assert not client.keys(f"{run_prefix('tiny')}:e:*")
    summary = json.loads((settings.run.folder / "summary.json").read_text())
    assert summary["episodes"] == stats.committed
    assert summary["reused_episodes"] > 0
