"""Traces of whole runs, as a collector gets them: through an actor's death, and without it."""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from buffer import operations
from buffer.store import Store
from tests.configs.support.collector import Collector, Received
from tests.system.support import slow_tool
from tests.system.support.live_run import TORCH, LiveRun, assert_nothing_lost_or_repeated

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

TALKS = (
    *TORCH,
    f"run.environment={slow_tool.__file__}:SlowTool",
    "run.environment_settings={}",
    'run.stop=["a"]',
    "run.max_completion_tokens=96",
    "run.eval_episodes=0",
    "run.steps=8",
    "buffer.on_stale=train",  # an episode that waited for another actor is trained all the same
    "learner.warm_start_steps=0",
    "actors.max_concurrent_episodes=16",
    "actors.count=2",
)
OF_ACTORS = ("environment", "sample", "judge", "reward", "submit", "fail")


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


def of_task(spans: list[Received], task_id: int) -> list[Received]:
    found = [span for span in spans if span.attributes.get("nyala.task") == task_id]
    return sorted(found, key=lambda span: (span.began_ns, span.ended_ns))


def actor_of(span: Received) -> str:
    name: str = span.process["service.instance.id"]
    return name


def seen_in_the_middle(run: LiveRun, collector: Collector, name: str) -> int | None:
    """Find a task of this actor of which the collector has a turn, and the store its tokens."""
    with Store((run.folder / "redis.url").read_text().strip(), run.folder.name) as store:
        tasks = store.run(operations.inspect()).values()
    for task in tasks:
        if task.state == "L" and task.length and task.incarnation.startswith(f"{name}-"):
            spans = of_task(list(collector.received), task.task_id)
            names = {span.name for span in spans if span.attributes.get("nyala.fence")}
            if {"lease", "judge"} <= names and "submit" not in names:
                return task.task_id
    return None


def kill_in_the_middle(run: LiveRun, collector: Collector) -> int | None:
    """Kill an actor in an episode that the collector has seen of it; returns its task."""
    for name, pid in run.actor_processes().items():
        os.kill(pid, signal.SIGSTOP)  # while it is looked at
        task_id = seen_in_the_middle(run, collector, name)
        os.kill(pid, signal.SIGCONT if task_id is None else signal.SIGKILL)
        if task_id is not None:
            return task_id
    return None


def wait_for(run: LiveRun, find: Callable[[], int | None], what: str) -> int:
    found: list[int] = []

    def has_found() -> bool:
        task_id = find()
        found.extend(() if task_id is None else (task_id,))
        return bool(found)

    run.wait_until(has_found, what)
    return found[0]


def test_an_episode_that_outlives_its_actor_is_one_trace_with_both_lives(
    tmp_path: Path, collector: Collector
) -> None:
    tracing = (f"run.tracing.endpoint={collector.endpoint}", "run.tracing.share=1.0")
    run = LiveRun(tmp_path, "tiny.yaml", *TALKS, *tracing)

    with run.up() as process:
        run.wait_until(lambda: len(run.actors()) == 2, "both actors' episodes are trained")
        task_id = wait_for(run, lambda: kill_in_the_middle(run, collector), "an actor is killed")
        summary = run.finish(process)

    assert_nothing_lost_or_repeated(run, summary)
    assert_each_task_is_one_trace(collector.received)
    spans = of_task(collector.received, task_id)
    # A grant whose reply met a dead actor has no phase; it went on to another.
    lives = [life for life in lives_of(spans) if len(life) > 1]
    for lease, *phases in lives:
        assert {actor_of(span) for span in phases} == {lease.attributes["nyala.actor"]}
        assert all(span.parent_id == lease.span_id for span in phases)
        assert all(a.ended_ns <= b.began_ns for a, b in pairwise(phases))
    for before, after in pairwise(lives):
        assert max(span.ended_ns for span in before) < min(span.began_ns for span in after)
    (first, *early), *_, (last, *late) = lives
    assert len(lives) >= 2, "the killed actor's, and another's"
    assert first.attributes["nyala.actor"] != last.attributes["nyala.actor"]
    assert first.attributes["nyala.stored_tokens"] == 0 < last.attributes["nyala.stored_tokens"]
    assert {"environment", "sample", "judge"} <= {span.name for span in early}
    assert "submit" not in {span.name for span in early}
    assert [span.name for span in late][-2:] == ["reward", "submit"]
    assert_ends_in_a_batch(collector.received, spans)


def lives_of(spans: list[Received]) -> list[list[Received]]:
    """Each lease with what its actor has done under it, in the order of the fences."""
    by_fence = {s.attributes["nyala.fence"]: [s] for s in spans if s.name == "lease"}
    for span in spans:
        if span.name in OF_ACTORS:
            by_fence[span.attributes["nyala.fence"]].append(span)
    return [life for _, life in sorted(by_fence.items())]


def assert_each_task_is_one_trace(spans: list[Received]) -> None:
    traces, tasks = defaultdict(set), defaultdict(set)
    for span in spans:
        if span.name != "batch":
            traces[span.attributes["nyala.task"]].add(span.trace_id)
            tasks[span.trace_id].add(span.attributes["nyala.task"])
    assert {len(found) for found in (*traces.values(), *tasks.values())} == {1}
    known = {(span.trace_id, span.span_id) for span in spans}
    assert len(known) == len(spans), "no span is there twice"
    assert [s for s in spans if s.parent_id and (s.trace_id, s.parent_id) not in known] == []
    services = {span.process["service.name"] for span in spans}
    assert services == {"nyala-actor", "nyala-broker", "nyala-learner"}


def assert_ends_in_a_batch(all_spans: list[Received], spans: list[Received]) -> None:
    *_, store, train = [span for span in spans if span.name not in OF_ACTORS]
    assert (store.name, store.attributes["nyala.verdict"]) == ("store", "OK")
    assert train.name == "train"
    assert store.ended_ns <= train.began_ns
    ((trace_id, span_id),) = train.links
    (batch,) = [s for s in all_spans if (s.trace_id, s.span_id) == (trace_id, span_id)]
    assert batch.name == "batch"
    assert batch.attributes["nyala.step"] == train.attributes["nyala.step"]
    assert (train.trace_id, train.span_id) in batch.links


def test_a_collector_that_hangs_changes_nothing_of_a_run(
    tmp_path: Path, collector: Collector
) -> None:
    collector.hangs.set()
    tracing = (f"run.tracing.endpoint={collector.endpoint}", "run.tracing.share=1.0")
    run = LiveRun(tmp_path, "tiny.yaml", *tracing)

    with run.up() as process:
        summary = run.finish(process)

    assert_nothing_lost_or_repeated(run, summary)
    assert summary["steps"] == 6
    for role in ("broker", "learner", "actor-0"):
        assert "spans were not sent" in (run.folder / "logs" / f"{role}.log").read_text(), role
