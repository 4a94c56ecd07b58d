"""Calls and replies survive the mailbox, and nothing that lies there raises another error."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.protocol import agent_calls
from broker.protocol.agent_calls import (
    MAX_BODY_BYTES,
    AgentAnswer,
    AgentCall,
    AgentError,
    CalledTool,
    decode_call,
    decode_reply,
    encode_call,
    encode_reply,
    ids_of,
    logprobs_of,
)
from configs.errors import RecordError

IDS, LOGPROBS = b"\x07\0\0\0\x08\0\0\0", b"\0\0\0\xbf\0\0\x80\xbf"
FULL = AgentAnswer(
    "tool_calls",
    1,
    2,
    "text",
    "reasoning",
    (CalledTool("c1", "add", "{}"),),
    b"\x01\0\0\0",
    IDS,
    LOGPROBS,
    (b"a", b"\xff"),
)


@given(st.sampled_from(["chat", "generate"]), st.binary(max_size=50))
def test_a_call_is_read_as_it_was_written(route, body):
    assert decode_call(encode_call(AgentCall(route, body))) == (route, body)


@pytest.mark.parametrize(
    "stored", [b"", b"chat", b"other\n{}", b"chat\n" + bytes(MAX_BODY_BYTES + 1)]
)
def test_other_bytes_are_no_call(stored):
    with pytest.raises(RecordError, match="a call must be a line with its route"):
        decode_call(stored)


@pytest.mark.parametrize("reply", [FULL, AgentAnswer("stop", 0, 0), AgentError(404, "x", "model")])
def test_a_reply_is_read_as_it_was_written(reply):
    assert decode_reply(encode_reply(reply)) == reply


def test_tokens_and_logprobs_are_read_as_numbers():
    assert (ids_of(IDS), logprobs_of(LOGPROBS)) == ([7, 8], [-0.5, -1.0])


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"prompt_ids": IDS}, "prompt_ids of a reply must be empty or have the length 4, got 8"),
        ({"completion_ids": IDS[:4]}, "completion_ids of a reply"),
        ({"logprobs": IDS[:4]}, "logprobs of a reply must be empty or"),
        ({"logprobs": b"\0\0\xc0\x7f" * 2}, "logprobs of a reply must be finite"),
        ({"pieces": (b"a",)}, "pieces of a reply"),
        ({"num_completion_tokens": -1}, "a reply must have the fields of its type"),
        ({"finish_reason": "aborted"}, "a reply must have the fields of its type"),
    ],
)
def test_a_reply_whose_parts_do_not_fit_is_refused_by_its_writer(changes, text):
    fields = {name: getattr(FULL, name) for name in FULL.__struct_fields__}
    with pytest.raises(RecordError, match=text):
        encode_reply(AgentAnswer(**fields | changes))


@given(st.binary(max_size=200))
def test_other_bytes_are_no_reply(stored):
    with pytest.raises(RecordError, match="a reply must"):
        decode_reply(stored)


def test_a_reply_is_bounded(monkeypatch):
    monkeypatch.setattr(agent_calls, "MAX_REPLY_BYTES", 100)
    with pytest.raises(RecordError, match="a reply must be at most 100 bytes"):
        encode_reply(AgentAnswer("stop", 0, 0, text="x" * 100))
