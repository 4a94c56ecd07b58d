"""Spans of an episode, as the functions make them that the roles call."""

import asyncio
from collections import defaultdict
from types import SimpleNamespace

from configs.traces import (
    MAX_LINKS,
    MAX_WAITING,
    TRACES,
    UNTRACED,
    EpisodePhase,
    begin_lease_trace,
    lease_of,
    root_of,
    trace_batch,
    trace_created,
    trace_dropped,
    trace_expired,
    trace_leased,
    tracing_stores,
    training_of,
)
from tests.configs.support.recording import IDS, recording


def lease(task_id, fence, length=0):
    return SimpleNamespace(task_id=task_id, fence=fence, length=length)


def store(*records, verdict="OK"):
    async def answer():
        return [verdict for _ in records]

    return asyncio.run(tracing_stores(records, answer()))


def test_what_every_role_sees_of_an_episode_is_one_tree():
    with recording() as recorded:
        trace_created([7], began_ns=1)
        trace_leased([lease(7, 5, 3)], actor="a", began_ns=2)
        life = begin_lease_trace(7, 5)
        life.enter(EpisodePhase.SAMPLE, turn=0)
        life.enter(EpisodePhase.SUBMIT)
        store(lease(7, 5))
        life.end_trace("OK")
        trace_batch([7], lineage=1, step=4, took_s=0.5, is_replay=False)
        spans = {span.name: span for span in recorded.of_task(7)}
        (batch,) = recorded.named("batch")

    root = root_of(IDS.of_task(7))
    under_lease = lease_of(root.trace_id, 5).span_id
    assert spans["task"].address == root and spans["task"].parent_id is None
    assert spans["lease"].parent_id == spans["train"].parent_id == root.span_id
    assert {spans[name].parent_id for name in ("sample", "submit", "store")} == {under_lease}
    assert spans["lease"].attributes == {"task": 7, "fence": 5, "stored_tokens": 3, "actor": "a"}
    assert spans["train"].links == (batch.address,)
    assert batch.links == (training_of(root.trace_id, 1, 4),)
    assert batch.address.trace_id != root.trace_id
    assert 0.5 <= (batch.ended_ns - batch.began_ns) / 1e9 < 60


def test_one_phase_ends_where_the_next_begins():
    with recording() as recorded:
        life = begin_lease_trace(7, 5)
        life.enter(EpisodePhase.SAMPLE, turn=0)
        life.note(end_token=9)
        life.enter(EpisodePhase.JUDGE)
        life.end_trace("lost")
        sample, judge = recorded.spans

    assert sample.ended_ns == judge.began_ns
    assert sample.attributes == {"task": 7, "fence": 5, "turn": 0, "end_token": 9}
    assert judge.attributes == {"task": 7, "fence": 5, "outcome": "lost"}


def test_nothing_comes_of_a_lease_after_its_end():
    with recording() as recorded:
        life = begin_lease_trace(7, 5)
        life.enter(EpisodePhase.SAMPLE)
        life.end_trace("lost")
        life.note(end_token=9)
        life.enter(EpisodePhase.SUBMIT)
        life.end_trace("OK")

        assert [span.name for span in recorded.spans] == ["sample"]


def test_a_clock_that_is_set_back_makes_no_span_that_ends_before_it_begins(monkeypatch):
    with recording() as recorded:
        life = begin_lease_trace(7, 5)
        life.enter(EpisodePhase.SAMPLE)
        monkeypatch.setattr("configs.traces.time", SimpleNamespace(time_ns=lambda: 1000))
        life.end_trace("OK")
        trace_created([7], began_ns=2000)

        assert all(span.ended_ns >= span.began_ns for span in recorded.spans)
        assert len(recorded.spans) == 2


def test_a_record_that_is_refused_is_an_error_and_one_sent_again_is_not():
    with recording() as recorded:
        for verdict in ("OK", "DUP", "STALE"):
            assert store(lease(7, 5), verdict=verdict) == [verdict]

        assert [span.is_error for span in recorded.named("store")] == [False, False, True]


def test_dropped_groups_and_expired_leases_are_seen_in_each_episode():
    with recording() as recorded:
        trace_expired([9])
        trace_dropped([2], group_size=4, reason="stale")

        dropped = recorded.named("drop")
        assert [span.attributes["task"] for span in dropped] == [8, 9, 10, 11]
        assert {span.attributes["reason"] for span in dropped} == {"stale"}
        assert [span.name for span in recorded.of_task(9)] == ["expire", "drop"]


def test_a_batch_has_no_more_links_than_collectors_take():
    with recording() as recorded:
        trace_batch(range(300), lineage=1, step=1, took_s=0, is_replay=False)

        (batch,) = recorded.named("batch")
        assert len(batch.links) == MAX_LINKS
        assert batch.attributes["traced_episodes"] == len(recorded.named("train")) == 300


def see_everything():
    trace_created(range(50), began_ns=1)
    trace_leased([lease(each, 5) for each in range(50)], actor="a", began_ns=1)
    store(*(lease(each, 5) for each in range(50)))
    trace_expired(range(50))
    trace_dropped(range(10), group_size=5, reason="stale")
    trace_batch(range(50), lineage=1, step=1, took_s=0, is_replay=False)
    for each in range(50):
        life = begin_lease_trace(each, 5)
        life.enter(EpisodePhase.SAMPLE)
        life.end_trace("OK")


def test_an_episode_is_traced_by_all_or_by_nobody():
    with recording(share=0.3) as recorded:
        see_everything()
        spans = [span for span in recorded.spans if span.name != "batch"]

    by_name = defaultdict(set)
    for span in spans:
        by_name[span.name].add(span.attributes["task"])
    assert set(by_name) == {"task", "lease", "store", "expire", "drop", "train", "sample"}
    (tasks,) = {frozenset(tasks) for tasks in by_name.values()}
    assert 5 < len(tasks) < 30


def test_no_span_is_made_where_traces_are_off():
    see_everything()

    assert begin_lease_trace(1, 5) is UNTRACED
    assert TRACES.take_spans(MAX_WAITING) == []


def test_a_full_queue_drops_and_counts():
    with recording():
        trace_expired(range(MAX_WAITING + 5))

        assert TRACES.dropped == 5
        assert len(TRACES.take_spans(2 * MAX_WAITING)) == MAX_WAITING
