"""Export to a real HTTP server that reads it as a collector does, hangs, refuses or is away."""

import threading
import time

import pytest
from structlog.testing import capture_logs

from configs.settings import RunSettings
from configs.traces import (
    MAX_WAITING,
    TRACES,
    EpisodePhase,
    Span,
    TraceIds,
    Traces,
    begin_lease_trace,
    root_of,
    trace_batch,
    trace_created,
    trace_expired,
)
from configs.tracing import CLOSE_S, Exporter, tracing
from tests.configs.support.collector import Collector
from tests.waiting import wait_until

IDS = TraceIds("r", b"key")


def run_with(endpoint, share=1.0):
    return RunSettings(name="r", model="m", tracing={"endpoint": endpoint, "share": share})


def traced(run, **more):
    return tracing(run, "actor", salt=lambda: b"key", name="a-1", **more)


@pytest.fixture
def collector():
    with Collector() as collector:
        yield collector


@pytest.fixture
def quick(monkeypatch):
    """A second between looks is for machines."""
    monkeypatch.setattr("configs.tracing.EVERY_S", 0.02)


def lines(logged, event):
    return [line for line in logged if line["event"] == event]


def test_a_collector_has_the_spans_of_a_process_with_their_ids_times_and_links(collector):
    with capture_logs() as logged, traced(run_with(collector.endpoint)):
        trace_created([7], began_ns=1_000)
        trace_batch([7], lineage=1, step=4, took_s=0.5, is_replay=True)

    spans = {span.name: span for span in collector.received}
    task, train, batch = spans["task"], spans["train"], spans["batch"]
    assert task.trace_id == train.trace_id == f"{IDS.of_task(7):032x}"
    assert (task.parent_id, train.parent_id, batch.parent_id) == ("", task.span_id, "")
    assert task.began_ns == 1_000 < task.ended_ns
    assert train.links == ((batch.trace_id, batch.span_id),)
    assert batch.links == ((train.trace_id, train.span_id),)
    assert train.attributes == {
        "nyala.task": 7,
        "nyala.lineage": 1,
        "nyala.step": 4,
        "nyala.replay": True,
    }
    process = {name: task.process[name] for name in ("service.name", "service.instance.id")}
    assert process == {"service.name": "nyala-actor", "service.instance.id": "a-1"}
    assert task.process["nyala.run"] == "r"
    (line,) = lines(logged, "traces")
    assert (line["exported"], line["not_taken"], line["dropped"]) == (3, 0, 0)


def test_spans_arrive_while_the_process_goes_on(collector, quick):
    with traced(run_with(collector.endpoint)):
        trace_expired([7])
        wait_until(lambda: len(collector.received) == 1)


def test_spans_go_to_the_path_of_traces_below_the_endpoint(collector):
    for endpoint in (collector.endpoint, f"{collector.endpoint}/otlp/"):
        with traced(run_with(endpoint)):
            trace_expired([7])

    assert collector.paths == ["/v1/traces", "/otlp/v1/traces"]


def test_a_key_comes_from_the_environment(collector, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20xyz")

    with traced(run_with(collector.endpoint)):
        trace_expired([7])

    assert collector.headers[0]["authorization"] == "Bearer xyz"


def test_a_failure_is_an_error_of_its_span(collector):
    with traced(run_with(collector.endpoint)):
        life = begin_lease_trace(7, 5)
        life.enter(EpisodePhase.FAIL, kind="data")
        life.end_trace("OK")

    (span,) = collector.received
    assert span.is_error
    assert span.attributes["nyala.kind"] == "data"


def test_only_the_share_of_the_episodes_is_exported(collector):
    with traced(run_with(collector.endpoint, share=0.2)):
        trace_expired(range(1000))

    assert 120 < len(collector.received) < 280


def test_a_collector_that_refuses_costs_spans_and_is_named_once(collector, quick):
    with capture_logs() as logged, traced(run_with(collector.endpoint)):
        collector.status = 400
        for task_id in range(3):
            trace_expired([task_id])
            wait_until(lambda: len(collector.headers) > task_id)  # noqa: B023 - called at once
        collector.status = 200
        trace_expired([9])
        wait_until(lambda: len(collector.received) == 1)

    (away,) = lines(logged, "the collector does not accept spans")
    assert "400" in away["reason"]
    (back,) = lines(logged, "the collector accepts spans again")
    assert back["not_taken"] == 3
    (line,) = lines(logged, "traces")
    assert (line["exported"], line["not_taken"]) == (1, 3)


@pytest.mark.slow
def test_a_collector_that_is_away_is_named_and_holds_up_no_end(quick):
    with Collector() as gone:
        endpoint = gone.endpoint
    began = time.monotonic()

    with capture_logs() as logged, traced(run_with(endpoint)):
        trace_expired(range(2000))

    assert time.monotonic() - began < CLOSE_S + 8
    (line,) = lines(logged, "spans were not sent")
    assert line["exported"] == 0
    assert line["left"] + line["not_taken"] + 512 * line["is_sending"] >= 2000


@pytest.mark.slow
def test_a_collector_that_hangs_holds_up_neither_work_nor_end(collector, quick):
    collector.hangs.set()
    run = run_with(collector.endpoint)

    with capture_logs() as logged:
        with traced(run):
            trace_expired([1])
            assert collector.hung.wait(30)  # now it is being sent
            began = time.monotonic()
            trace_expired(range(MAX_WAITING + 10))
            worked_s = time.monotonic() - began
        closed_s = time.monotonic() - began - worked_s

    assert worked_s < 5
    assert closed_s < CLOSE_S + 4  # a request alone has ten seconds
    (line,) = lines(logged, "spans were not sent")
    assert line == line | {"left": MAX_WAITING, "dropped": 10, "is_sending": True}


class Held:
    """A collector that takes spans when it is told to."""

    def __init__(self):
        self.goes_on = threading.Event()
        self.taken = 0

    def send(self, spans):
        self.goes_on.wait(30)
        self.taken += len(spans)

    def close(self):
        self.goes_on.set()


class Broken(Held):
    """One whose code fails."""

    def send(self, spans):
        raise RuntimeError("no such field")


def test_the_end_waits_for_the_collector_no_longer_than_its_deadline():
    traces, held = Traces(), Held()
    traces.open(IDS, share=1.0)
    exporter = Exporter(traces, held, close_s=1.0).start()
    fill(traces, 1)

    began = time.monotonic()
    with capture_logs() as logged:
        exporter.close()
    took_s = time.monotonic() - began

    assert 1.0 <= took_s < 10
    assert held.goes_on.is_set(), "a request under way is given up"
    assert lines(logged, "spans were not sent")


def test_a_full_queue_is_named_once_until_it_has_had_room(quick):
    traces, held = Traces(), Held()
    traces.open(IDS, share=1.0)
    with capture_logs() as logged:
        exporter = Exporter(traces, held).start()
        fill(traces, MAX_WAITING + 700)
        held.goes_on.set()
        wait_until(lambda: held.taken >= MAX_WAITING)
        exporter.close()

    (line,) = lines(logged, "spans are dropped")
    assert line["dropped"] == traces.dropped > 0


def test_the_death_of_the_thread_is_heard_and_ends_nothing_else(quick):
    traces = Traces()
    traces.open(IDS, share=1.0)
    with capture_logs() as logged:
        exporter = Exporter(traces, Broken()).start()
        fill(traces, 1)
        wait_until(lambda: lines(logged, "a thread died of an unexpected error"))
        fill(traces, 3)
        exporter.close()

    assert lines(logged, "a thread died of an unexpected error")[0]["thread"] == "traces"
    assert lines(logged, "spans were not sent")[0]["left"] == 3


def fill(traces, count):
    for task_id in range(count):
        traces.queue_span(Span("expire", root_of(IDS.of_task(task_id)), None, 1, 2))


def test_without_an_endpoint_no_thread_runs_and_the_salt_is_not_asked_for():
    def salt():
        raise AssertionError("nobody needs it")

    threads = threading.active_count()
    with tracing(RunSettings(model="m"), "actor", salt=salt, name="a"):
        assert not TRACES.is_on
        assert threading.active_count() == threads


def test_traces_are_off_again_after_the_body(collector):
    with traced(run_with(collector.endpoint)):
        assert TRACES.is_on

    assert not TRACES.is_on
