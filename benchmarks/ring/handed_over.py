"""CPU time that the training thread spends on handing one batch over to those who watch.

The calls of rank 0, made again with the lines that a run has written and with episodes of its
size: groups into the queue of texts, the line into the page, the run snapshot as JSON to a server.
The advice gets the batch itself through a queue, which costs no more than that.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.delivery.arms import running_redis
from buffer.record.episode import Completion, Episode, FenceRun, PolicyVersion, VersionSpan
from configs.settings import Settings
from learner.reporting.metrics_page import LearnerPage
from learner.reporting.run_snapshot import RunSnapshot
from learner.reporting.sample_writer import SampleWriter

TURNS = 50
PROMPT_TOKENS, COMPLETION_TOKENS = 16, 8  # about those of the demo


def handed_over_us(settings: Settings, scratch: Path) -> dict[str, float]:
    """Return the training thread's CPU time per batch by what is handed over, microseconds.

    Args:
        settings: Of a run that has ended and kept texts; its `metrics.jsonl` is read.
        scratch: An empty folder, for texts and a server.
    """
    file = settings.run.folder / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    page, run_snapshot = LearnerPage(limit_s=60.0), RunSnapshot()
    run = settings.run.model_copy(update={"directory": scratch / "runs"})
    run.folder.mkdir(parents=True)
    texts = SampleWriter(
        run, step=0, lineage=1, environment_of=lambda _: "", decode=lambda _: "text"
    )
    batch = _episodes(run.groups_per_batch, run.group_size)
    texts.start()
    with running_redis(scratch) as (server, _):

        def tell(line: dict[str, object]) -> None:
            run_snapshot.add_batch(line)
            server.set("run_snapshot", run_snapshot.encode() or b"")

        found = {
            "texts": _us(lambda _: texts.keep_batch(1, batch), lines) / run.samples.every,
            "page": _us(page.trained, lines),
            "run_snapshot": _us(tell, lines),
        }
    texts.close()
    return {name: round(us, 1) for name, us in found.items()}


def _us(hand_over: Callable[[dict[str, object]], None], lines: list[dict[str, object]]) -> float:
    took = []
    for index in range(TURNS):
        began = time.thread_time()
        hand_over(lines[index % len(lines)])
        took.append(1e6 * (time.thread_time() - began))
    return median(took)


def _episodes(groups: int, of_a_group: int) -> list[Episode]:
    tokens = np.zeros(COMPLETION_TOKENS, np.int32)
    completion = Completion(
        token_ids=tokens,
        behaviour_logprobs=np.zeros(COMPLETION_TOKENS, np.float32),
        loss_mask=np.ones(COMPLETION_TOKENS, np.uint8),
        versions=(VersionSpan(PolicyVersion(1, 0), 0),),
        fences=(FenceRun(1, "actor", 0),),
    )
    return [
        Episode(
            task_id=task,
            group_id=task // of_a_group,
            purpose="train",
            prompt_ids=np.zeros(PROMPT_TOKENS, np.int32),
            completion=completion,
            reward=1.0,
            reward_parts={"exact": 1.0},
            finish_reason="stop",
            environment_metrics={},
            incarnation="actor",
            started_at=0.0,
            finished_at=1.0,
        )
        for task in range(groups * of_a_group)
    ]
