"""What the learner traces over two lives of a run, the first of which is killed after a batch."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from configs.traces import root_of, training_of
from learner.data.curriculum import eval_task_id
from learner.model.ranks import Ranks
from tests.configs.support.recording import IDS, recording
from tests.learner.support.ring_in_process import LifeEnded, RingInProcess
from tests.learner.support.tiny_run import tiny_settings


def test_each_task_has_one_root_and_each_training_is_linked_to_its_batch(
    redis_url: str, tmp_path: Path, ranks: Ranks
) -> None:
    settings = tiny_settings(tmp_path, run={"groups_per_batch": 2, "steps": 8, "eval_episodes": 4})
    ring = RingInProcess(settings, redis_url, ranks)
    ring.shelf.end_life_at = 5  # trained and published; the checkpoint is of step 4

    with recording() as recorded:
        with pytest.raises(LifeEnded):
            ring.live()
        assert ring.live()
        spans = recorded.spans

    lines = (settings.run.folder / "batches.jsonl").read_text().splitlines()
    size = settings.run.group_size
    roots = [span for span in spans if span.name == "task"]
    assert max(Counter(span.address for span in roots).values()) == 1
    by_step = {(s.attributes["lineage"], s.attributes["step"]): s for s in recorded.named("batch")}
    in_lives = {lineage: {k for life, k in by_step if life == lineage} for lineage in (1, 2)}
    assert in_lives == {1: {1, 2, 3, 4, 5}, 2: {5, 6, 7, 8}}, "the fifth was trained in both"
    assert by_step[2, 5].attributes["replay"] and not by_step[1, 4].attributes["replay"]
    trained = {span.address: span for span in recorded.named("train")}
    for line in map(json.loads, lines):
        batch = by_step[line["lineage"], line["step"]]
        ids = [g * size + member for g in line["group_ids"] for member in range(size)]
        where = [training_of(IDS.of_task(i), line["lineage"], line["step"]) for i in ids]
        assert set(batch.links) == set(where)
        assert batch.attributes["traced_episodes"] == len(ids)
        for task_id, address in zip(ids, where, strict=True):
            root = root_of(IDS.of_task(task_id))
            assert root in {span.address for span in roots}
            assert trained[address].parent_id == root.span_id
            assert trained[address].links == (batch.address,)
    assert eval_task_id(settings.run, 1, 0, 0) in {span.attributes["task"] for span in roots}


def test_a_feeder_that_resumes_gives_no_task_a_second_root(
    redis_url: str, tmp_path: Path, ranks: Ranks
) -> None:
    settings = tiny_settings(tmp_path, run={"steps": 8, "eval_episodes": 0})
    ring = RingInProcess(settings, redis_url, ranks)
    ring.shelf.end_life_at = 2

    with recording() as recorded:
        with pytest.raises(LifeEnded):
            ring.live()
        first = {span.address for span in recorded.named("task")}
        assert ring.live()
        every = [span.address for span in recorded.named("task")]

    assert len(every) == len(set(every)) > len(first) > 0
