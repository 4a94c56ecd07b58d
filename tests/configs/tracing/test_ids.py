"""Ids that processes derive alike, and the share of episodes that is sampled by them."""

from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased

from configs.traces import TraceIds, is_sampled, lease_of, root_of

IDS = TraceIds("demo", b"key")


def test_processes_of_a_run_derive_the_same_trace_and_others_another():
    trace = IDS.of_task(7)

    assert TraceIds("demo", b"key").of_task(7) == trace
    others = {
        IDS.of_task(8),
        IDS.of_batch(1, 7),
        TraceIds("demo", b"another key").of_task(7),
        TraceIds("dem", b"okey").of_task(7),
    }
    assert len(others | {trace}) == 5


def test_each_lease_of_a_task_is_a_span_of_its_own_in_one_trace():
    trace = IDS.of_task(7)

    spans = {root_of(trace), lease_of(trace, 5), lease_of(trace, 6)}

    assert len({span.span_id for span in spans}) == 3
    assert {span.trace_id for span in spans} == {trace}
    assert root_of(IDS.of_task(8)).span_id not in {span.span_id for span in spans}


def test_the_share_is_that_of_the_episodes_and_a_larger_one_has_those_of_a_smaller():
    traces = [IDS.of_task(task_id) for task_id in range(4000)]

    by_share = {
        share: {each for each in traces if is_sampled(each, share)} for share in (0.1, 0.3, 1.0)
    }

    assert 300 < len(by_share[0.1]) < 500
    assert by_share[0.1] < by_share[0.3] < by_share[1.0]
    assert len(by_share[1.0]) == 4000


def test_other_programs_that_sample_by_the_id_choose_the_same():
    theirs = TraceIdRatioBased(0.3)

    for task_id in range(500):
        trace = IDS.of_task(task_id)
        decision = theirs.should_sample(None, trace, "episode").decision
        assert is_sampled(trace, 0.3) == (decision is Decision.RECORD_AND_SAMPLE)
