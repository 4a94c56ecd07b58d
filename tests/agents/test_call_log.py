"""A log of calls has every body whole, and stores each shared prefix once."""

from hypothesis import given
from hypothesis import strategies as st

from actors.episodes.agent_log import CallBodies
from agents.call_log import CallLog, common_prefix
from broker.protocol.conversation_messages import StoredCall

BODIES = st.lists(st.binary(max_size=12).map(lambda body: bytes(x % 3 for x in body)), max_size=12)


def shared(one: bytes, other: bytes) -> int:
    """Count equal first bytes, one after the other."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count


@given(BODIES)
def test_each_call_keeps_the_longest_prefix_that_any_earlier_one_has(bodies):
    log, read = CallLog(), CallBodies()

    for number, body in enumerate(bodies, start=1):
        parent, keep, tail = log.add(body)
        read.calls.append(StoredCall(parent, keep, tail, is_answered=False))

        assert keep == max((shared(body, other) for other in bodies[: number - 1]), default=0)
        kept = read.body(parent)[:keep] if parent else b""
        assert kept + tail == body
        assert parent < number
    assert [read.body(number) for number in range(1, len(bodies) + 1)] == bodies


@given(st.binary(max_size=8), st.binary(max_size=8), st.binary(max_size=8))
def test_common_prefixes_are_counted(head, body, tail):
    assert common_prefix(head + body, len(head), tail) == shared(body, tail)
    assert common_prefix(head + tail + body, len(head), tail) == len(tail)


def test_a_refused_call_leaves_no_trace():
    log = CallLog()
    log.add(b"abc")
    log.add(b"abe")
    log.take_back()

    assert log.add(b"abe!") == (1, 2, b"e!")
    assert len(log) == 2
