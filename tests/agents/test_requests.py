"""Requests of agents: what becomes of each field."""

import json
import tracemalloc
from contextlib import suppress

import pytest

from agents.requests import RequestError, read_chat, read_generate, read_reward

MESSAGES = [{"role": "user", "content": "2+3?"}]


def chat(**fields):
    return read_chat(json.dumps({"messages": MESSAGES, **fields}).encode())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "add"}}),
        ("response_format", {"type": "json_object"}),
        ("guided_json", {"type": "object"}),
        ("guided_regex", "a+"),
        ("structured_outputs", {"json": {}}),
        ("logit_bias", {"5": 100}),
        ("top_logprobs", 5),
        ("logprobs", 2),
        ("logprobs", 1),
        ("stream", 1),
        ("return_token_ids", 0),
        ("functions", [{"name": "add"}]),
        ("min_tokens", 3),
        ("ignore_eos", True),
        ("echo", True),
        ("max_tokens", 0),
        ("max_tokens", "many"),
        ("stop", [1]),
        ("stop", ["x"] * 17),
        ("messages", []),
        ("messages", ["hello"]),
    ],
)
def test_what_a_run_cannot_do_is_refused_by_name(field, value):
    with pytest.raises(RequestError, match=rf"^{field} must be .*, got .*; \w+") as failed:
        chat(**{field: value})

    assert (failed.value.status, failed.value.field) == (400, field)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 1),
        ("response_format", {"type": "text"}),
        ("logit_bias", None),
        ("tool_choice", None),
        ("functions", []),
        ("logprobs", False),
    ],
)
def test_defaults_are_no_wishes(field, value):
    assert chat(**{field: value}).ignored == ()


def test_what_the_run_decides_is_ignored_by_name():
    wanted = chat(temperature=0, top_p=0.5, seed=3, model="m", stream=True, user="u")

    assert wanted.ignored == ("seed", "temperature", "top_p")
    assert wanted.is_streamed
    assert wanted.model == "m"
    assert wanted.stored == b'chat\n{"messages":[{"role": "user", "content": "2+3?"}]}'


def test_messages_come_last_in_a_call_and_values_stay_as_they_are():
    body = b'{"messages": [{"role":"user", "content":"\\u00e9"}], "tools": [ ], "stop":"x"}'
    stored = read_chat(body).stored

    assert stored == (
        b'chat\n{"stop":"x","tools":[ ],"messages":[{"role":"user", "content":"\\u00e9"}]}'
    )


def test_null_is_a_field_that_is_left_out():
    assert chat(stop=None, tools=None, stream=None).stored == chat().stored
    without = read_generate(b'{"token_ids": [1]}')
    assert read_generate(b'{"token_ids": [1], "sampling_params": null}') == without
    assert read_generate(b'{"token_ids": [1], "sampling_params": {"logprobs": 1}}') == without


@pytest.mark.parametrize("field", ["messages", "stop", "n"])
def test_a_body_of_millions_of_values_is_read_without_an_object_for_each(field):
    many = b"[%s]" % b",".join([b"[1]"] * 2_000_000)
    if field == "messages":
        many = b'[{"role":"user","x":%s}]' % many
    body = b'{"messages":[{"role":"user"}],"%s":%s}' % (field.encode(), many)
    tracemalloc.start()
    try:
        with suppress(RequestError):
            read_chat(body)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert most < 4 * len(body)  # a list for each takes 30 times that


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"token_ids": []}, "token_ids must be a list"),
        ({"token_ids": [-1]}, "token_ids must be a list"),
        ({"token_ids": [True]}, "token_ids must be a list"),
        ({"token_ids": [1], "stream": True}, "stream must be false"),
        ({"token_ids": [1], "output_mode": "text"}, "output_mode must be tokens"),
        ({"token_ids": [1], "features": {"mm_hashes": {"a": []}}}, "features must be left out"),
        ({"token_ids": [1], "sampling_params": {"n": 2}}, "n must be left out"),
        ({"token_ids": [1], "sampling_params": {"stop_token_ids": [-1]}}, "stop_token_ids"),
        ({"token_ids": [1], "sampling_params": 3}, "sampling_params must be a JSON object"),
    ],
)
def test_tokens_that_cannot_be_sampled_after_are_refused(body, text):
    with pytest.raises(RequestError, match=text):
        read_generate(json.dumps(body).encode())


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({}, "reward must be a number, got None; send it, or done: true"),
        ({"reward": "1"}, "reward must be a number"),
        ({"reward": True}, "reward must be a number"),
        ({"reward": 1, "parts": {"a": "b"}}, "parts must be at most"),
        ({"reward": 1, "call": "chatcmpl-x"}, "call must be the id of an answer"),
        ({"reward": 1, "rewards": 2}, "rewards must be left out"),
        ({"error": 1}, "error must be a text"),
    ],
)
def test_a_reward_that_is_none_is_refused(body, text):
    with pytest.raises(RequestError, match=text):
        read_reward(json.dumps(body).encode())


def test_a_reward_names_its_call():
    wanted = read_reward(b'{"reward": 1, "call": "chatcmpl-12", "parts": {"exact": 0}}')

    assert wanted == (12, 1.0, {"exact": 0.0}, False) or (
        wanted.number,
        wanted.reward,
        wanted.parts,
        wanted.is_done,
    ) == (12, 1.0, {"exact": 0.0}, False)
