"""Episodes of live agents: whose tokens a call goes on with, and what is left after a kill."""

from __future__ import annotations

import asyncio
import gc
import json
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest

from actors.engine.tokenizer import ModelTokenizer
from actors.episodes.agent_chat import CallError, answer_of, read_request
from broker.protocol.agent_calls import AgentAnswer, AgentCall, AgentError, AgentReply, ids_of
from broker.protocol.conversation_messages import Reward
from buffer.record.episode import Branch
from configs.errors import RewardError
from tests.actors.support.agent_world import Actors, check_record, live
from tests.actors.support.saved_tokenizer import LETTERS, save_tokenizer

THINKING = (
    "{% set last = namespace(user=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.index0 > last.user %}<think>{{ m.reasoning_content }}"
    "</think>{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
    "{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FAULTY = "{% if divisor is defined %}{{ 1 / divisor }}{% endif %}{% if not is_mute %}"
"""Before a template that raises any error, or writes nothing, if it is told so."""
ASKED = [{"role": "user", "content": "question"}]
TOOLS = [{"type": "function", "function": {"name": "add"}}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    folder = tmp_path_factory.mktemp("chat")
    template = FAULTY + THINKING + "{% endif %}"
    return ModelTokenizer(save_tokenizer(folder, template=template, letters=LETTERS + '{}":,.\\'))


def answered(reply: AgentReply) -> AgentAnswer:
    assert isinstance(reply, AgentAnswer), reply
    return reply


def refused(reply: AgentReply) -> AgentError:
    assert isinstance(reply, AgentError), reply
    return reply


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def branches(actors: Actors) -> tuple[Branch, ...]:
    check_record(actors)
    return actors.rollout.completion().branches


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_an_agent_is_never_run_again_whenever_its_actors_are_killed(
    tokenizer: ModelTokenizer, first: int
) -> None:
    kills = turns = num_branches = 0
    for seed in range(first, first + 50):
        actors = live(tokenizer, seed)

        check_record(actors)
        kills, turns = kills + actors.kills, turns + actors.rollout.num_turns
        num_branches += len(actors.rollout.completion().branches)

    assert kills > 50 and turns > 100 and num_branches > 50


@pytest.mark.parametrize(("limit", "end"), [(60, 0.1), (150, 0.02), (4000, 0.005)])
def test_conversations_without_room_and_with_long_turns_survive_kills(
    tokenizer: ModelTokenizer, limit: int, end: float
) -> None:
    replies: list[AgentReply] = []
    for seed in range(40):
        actors = live(tokenizer, seed, limit=limit, end=end)

        check_record(actors)
        replies += actors.box.replies.values()

    is_short = limit < 4000
    assert any(isinstance(reply, AgentError) for reply in replies) is is_short


def test_a_reply_that_leaves_before_its_tokens_are_stored_is_lost_with_its_actor(
    tokenizer: ModelTokenizer,
) -> None:
    lost = 0
    for seed in range(40):
        try:
            check_record(live(tokenizer, seed, with_tokens=False))
        except AssertionError:
            lost += 1

    assert lost


def test_a_further_message_follows_the_sampled_tokens(tokenizer: ModelTokenizer) -> None:
    actors = Actors(tokenizer)
    first = answered(actors.turn("look", ASKED))
    second = answered(actors.turn("done", [*ASKED, said("look"), {"role": "tool", "content": "7"}]))

    path = (*ids_of(first.prompt_ids), *ids_of(first.completion_ids))
    between = ids_of(second.prompt_ids)[len(path) :]
    assert tuple(ids_of(second.prompt_ids)[: len(path)]) == path
    assert tokenizer.decode(between) == "\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n"
    assert branches(actors) == ()
    assert (first.text, second.text, second.finish_reason) == ("look", "done", "stop")


def test_a_rewritten_history_forks_at_the_longest_common_prefix(
    tokenizer: ModelTokenizer,
) -> None:
    actors = Actors(tokenizer)
    actors.turn("look there", ASKED)
    again = answered(actors.turn("done", [*ASKED, said("look"), {"role": "user", "content": "go"}]))

    (branch,) = branches(actors)
    assert branch.parent == len("look")
    completion = actors.rollout.completion()
    assert sum(completion.loss_mask.tolist()) == len("look there") + 1 + len("done") + 1
    text = "question<|im_end|>\n<|im_start|>assistant\nlook<|im_end|>\n"
    assert text in tokenizer.decode(ids_of(again.prompt_ids))


def test_a_sub_agent_begins_a_root(tokenizer: ModelTokenizer) -> None:
    actors = Actors(tokenizer)
    actors.turn("look", ASKED)
    actors.turn("done", [{"role": "system", "content": "you help"}, *ASKED])

    (branch,) = branches(actors)
    assert branch.parent is None


def test_the_same_question_again_follows_the_prompt(tokenizer: ModelTokenizer) -> None:
    actors = Actors(tokenizer)
    actors.turn("look", ASKED)
    actors.turn("done", ASKED)

    assert branches(actors) == (Branch(len("look") + 1, 0),)


def test_turns_side_by_side_are_whole_and_begin_in_the_order_of_their_calls(
    tokenizer: ModelTokenizer,
) -> None:
    actors = Actors(tokenizer)
    for content in ("question", "title"):
        asked = [{"role": "user", "content": content}]
        actors.box.call({"messages": asked, "return_token_ids": True})
    actors.listen()
    (first, second), end = list(actors.running), tokenizer.stop_token_ids[0]

    actors.sample(second, [1, 2, end])
    assert not actors.rollout.replies and not actors.rollout.length  # the first call is the prompt
    actors.sample(first, [3])
    assert list(actors.rollout.replies) == [2]
    actors.say()
    actors.kill()
    assert len(actors.running) == 1
    actors.sample(next(iter(actors.running)), [4, end])
    actors.say()

    texts = {number: answered(reply).text for number, reply in actors.box.replies.items()}
    assert texts == {1: tokenizer.decode([3, 4]), 2: tokenizer.decode([1, 2])}
    assert [branch.parent for branch in branches(actors)] == [None, 1]


@pytest.mark.parametrize(("role", "is_dropped"), [("tool", False), ("user", True)])
def test_a_template_that_drops_thinking_forks_where_it_does(
    tokenizer: ModelTokenizer, role: str, is_dropped: bool
) -> None:
    actors = Actors(tokenizer)
    thought = answered(actors.turn("<think>why</think>look", ASKED))
    more = {"role": role, "content": "7"}
    again = answered(actors.turn("done", [*ASKED, said("look"), more]))

    assert (thought.reasoning, thought.text) == ("why", "look")
    shown = tokenizer.decode(ids_of(again.prompt_ids))
    assert ("<think>" not in shown) is is_dropped
    parents = [branch.parent for branch in branches(actors)]
    assert parents == ([0] if is_dropped else [])


def test_ids_and_spacing_of_calls_make_no_difference(tokenizer: ModelTokenizer) -> None:
    actors = Actors(tokenizer)
    text = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    called = answered(actors.turn(text, ASKED, tools=TOOLS))
    (call,) = called.tool_calls
    assert (called.finish_reason, called.text, call.name) == ("tool_calls", "", "add")
    assert json.loads(call.arguments) == {"a": 1, "b": 2}

    function = {"name": "add", "arguments": '{"b":2,"a":1}'}
    sent_back = said("", tool_calls=[{"id": "x", "type": "function", "function": function}])
    result = {"role": "tool", "tool_call_id": "x", "content": "3"}
    second = answered(actors.turn("3", [*ASKED, sent_back, result], tools=TOOLS))

    assert text in tokenizer.decode(ids_of(second.prompt_ids))
    assert branches(actors) == ()


def test_tokens_go_on_with_tokens(tokenizer: ModelTokenizer) -> None:
    actors = Actors(tokenizer)
    end = tokenizer.stop_token_ids[0]
    for token_ids in ([5, 6], [5, 6, 7, end, 8], [5, 6, 7, 9], [1, 2]):
        actors.box.call({"token_ids": token_ids}, route="generate")
        actors.listen()
        actors.sample(next(iter(actors.running)), [7, end])
        actors.say()

    assert branches(actors) == (Branch(5, 1), Branch(8, None))
    first = answered(actors.box.replies[1])
    assert (ids_of(first.prompt_ids), ids_of(first.completion_ids)) == ([5, 6], [7, end])


def test_a_call_bounds_its_turn(tokenizer: ModelTokenizer) -> None:
    actors = Actors(tokenizer)
    cut = answered(actors.turn("look there", ASKED, max_tokens=4))
    actors.box.call({"messages": ASKED, "stop": [" th"]})
    actors.listen()
    ((request, _),) = actors.running.values()

    assert (cut.text, cut.finish_reason) == ("look", "length")
    assert request.stop_strings is not None
    assert request.stop_strings.cut("look there") == "look"
    assert answered(actors.turn("say thanks", ASKED, stop=[" th"])).text == "say"


def test_a_conversation_without_room_is_told_so_and_ends_by_length(
    tokenizer: ModelTokenizer,
) -> None:
    actors = Actors(tokenizer, limit=12)
    cut = answered(actors.turn("a long answer", ASKED))
    error = refused(actors.turn("more", [*ASKED, said(cut.text), *ASKED]))
    actors.rollout.end("ended", "", [Reward(0, 1.0)])
    actors.rollout.settle(asyncio.run(actors.rollout.judge()))

    assert cut.finish_reason == "length" and cut.num_completion_tokens == 12
    assert error.status == 400 and "context_length_exceeded" in error.text
    assert actors.rollout.finish_reason == "length"


def test_an_agent_that_forks_behind_a_long_path_all_the_time_is_told_that_it_has_no_room(
    tokenizer: ModelTokenizer,
) -> None:
    actors = Actors(tokenizer)
    end, path = tokenizer.stop_token_ids[0], [5, 6, *[7] * 1000]
    for token_ids in (
        [5, 6],
        *([*path, 8, 9 + other // 50, 9 + other % 50] for other in range(300)),
    ):
        actors.box.call({"token_ids": token_ids}, route="generate")
        actors.listen()
        for request in list(actors.running):
            actors.sample(request, [end] if actors.rollout.length else [*path[2:], end])
        actors.say()

    errors = [reply for reply in actors.box.replies.values() if isinstance(reply, AgentError)]
    assert len(branches(actors)) > 100 and errors
    assert "context_length_exceeded" in errors[0].text


def test_a_first_prompt_that_is_too_long_is_none(tokenizer: ModelTokenizer) -> None:
    actors = Actors(tokenizer)
    long = [{"role": "user", "content": "x" * 300}]
    error = refused(actors.turn("no", long))
    answered(actors.turn("look", ASKED))
    actors.kill()

    assert "maximum context length is 200 tokens" in error.text
    assert "question" in tokenizer.decode(actors.rollout.prompt_ids)
    assert branches(actors) == ()


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "messages must be a list"),
        ({"messages": [{"content": "x"}]}, "must have a role"),
        ({"messages": ASKED, "max_tokens": "many"}, "max_tokens"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "content must be text",
        ),
        ({"messages": [*ASKED, said("", tool_calls=[{}])]}, "must have functions with names"),
        ({"messages": [*ASKED, said("", tool_calls=5)]}, "must have functions with names"),
        ({"messages": [{"role": "user", "content": 5}]}, "content must be text"),
        ({"messages": [5]}, "Expected `object`"),
        ({"messages": ASKED, "tools": [5]}, "Expected `object`"),
        ({"messages": ASKED, "stop": ""}, "length >= 1"),
        ({"messages": ASKED, "chat_template_kwargs": {"chat_template": "x"}}, "'chat_template'"),
        ({"messages": ASKED, "chat_template_kwargs": {"return_dict": True}}, "'return_dict'"),
        ({"messages": ASKED, "chat_template_kwargs": {"self": 1}}, "'self'"),
        ({"messages": ASKED, "chat_template_kwargs": {"messages": []}}, "suit the chat template"),
        ({"messages": ASKED, "chat_template_kwargs": {"divisor": 0}}, "division by zero"),
        ({"messages": ASKED, "chat_template_kwargs": {"is_mute": True}}, "writes something"),
        ({"token_ids": [1, 10**6]}, "token_ids must be below"),
    ],
)
def test_a_call_that_cannot_be_read_is_refused_and_the_next_one_is_not(
    tokenizer: ModelTokenizer, fields: dict[str, Any], text: str
) -> None:
    actors = Actors(tokenizer)
    actors.box.call(fields, route="generate" if "token_ids" in fields else "chat")
    actors.listen()
    actors.say()
    answered(actors.turn("look", ASKED))
    actors.kill()

    assert text in refused(actors.box.replies[1]).text
    assert actors.rollout.num_turns == 1


HALF = "\ud83d"
"""Half of a surrogate pair, as the cut text of a tool ends with."""


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{HALF: HALF}]},
        {"stop": [HALF]},
        {"chat_template_kwargs": {HALF: HALF}},
        {"messages": [{"role": HALF, "content": HALF, "name": HALF}]},
        {"messages": [said("", tool_calls=[{"function": {"name": HALF, "arguments": HALF}}])]},
        {
            "messages": [
                said("", tool_calls=[{"function": {"name": "a", "arguments": '{"a": "\\ud83d"}'}}])
            ]
        },
        {"messages": [said("", tool_calls=[{"function": {"name": "a", "arguments": 7}}])]},
        {"messages": [said("", tool_calls=[{"function": {"name": "a", "arguments": "{"}}])]},
        {"messages": [{"role": "tool", "content": "x", "name": 5, "tool_call_id": [1]}]},
        {"max_tokens": 10**30},
    ],
)
def test_what_odd_clients_send_is_answered(
    tokenizer: ModelTokenizer, fields: dict[str, Any]
) -> None:
    actors = Actors(tokenizer)

    reply = answered(actors.turn("look", **{"messages": ASKED} | fields))

    assert reply.text == "look"
    assert branches(actors) == ()


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "add", "arguments": {"a": ' + "[" * 200 + "]" * 200 + "}}</tool_call>",
        '<tool_call>{"name": "add", "arguments": {"a": ' + "[" * 5000 + "}}</tool_call>",
        '<tool_call>{"name": "' + "x" * 70_000 + '", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {}}</tool_call>' * 257,
        '<tool_call>{"name": "add", "arguments": {"a": "\\ud83d"}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "add"}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {}}',
    ],
)
def test_calls_that_are_malformed_or_too_many_stay_text(text: str) -> None:
    body = json.dumps({"messages": ASKED, "tools": TOOLS}).encode()
    request = read_request(AgentCall("chat", body))

    answer, message = answer_of(request, text, number=1, is_cut=False, shows_reasoning=True)

    assert (answer.text, answer.tool_calls, answer.finish_reason) == (text, (), "stop")
    assert message == {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("opened", "text", "reasoning", "content"),
    [
        ("", "<think>\nsee", "see", ""),
        ("", "<think>see</think>\n\nlook", "see", "look"),
        ("", "look", "", "look"),
        ("<think>\n", "see", "see", ""),
        ("<think>\n", "see</think>look", "see", "look"),
    ],
)
def test_thinking_that_is_cut_off_is_no_answer(
    tmp_path: Path, opened: str, text: str, reasoning: str, content: str
) -> None:
    begin = "<|im_start|>assistant\n"
    template = THINKING.replace(begin + "{%", begin + opened + "{%")
    opening = ModelTokenizer(save_tokenizer(tmp_path, template=template, letters=LETTERS))

    reply = answered(Actors(opening).turn(text, ASKED))

    assert (reply.reasoning, reply.text) == (reasoning, content)


def test_a_body_that_is_nested_deeply_is_refused() -> None:
    with pytest.raises(CallError, match="the body must be JSON"):
        read_request(AgentCall("chat", b'{"messages":' + b"[" * 100_000))


def test_a_reward_is_what_the_agent_posts_or_its_calls_together(
    tokenizer: ModelTokenizer,
) -> None:
    for rewards, wanted in (
        ([Reward(0, 0.5, {"exact": 1.0}), Reward(1, 9.0)], 0.5),
        ([Reward(1, 0.25), Reward(2, 0.5)], 0.75),
    ):
        actors = Actors(tokenizer)
        actors.turn("look", ASKED)
        actors.rollout.end("died", "", rewards)
        actors.rollout.settle(asyncio.run(actors.rollout.judge()))

        assert actors.rollout.score is not None and actors.rollout.score.reward == wanted
        assert actors.rollout.finish_reason == "environment"
        assert [turn.role for turn in actors.rollout.turns] == ["user", "assistant"]


def test_an_agent_without_any_reward_fails_with_its_last_words(tokenizer: ModelTokenizer) -> None:
    actors = Actors(tokenizer)
    actors.turn("look", ASKED)
    actors.rollout.end("died", "exit code 3", [])

    with pytest.raises(RewardError, match=r"must post a reward, got none.*died.*exit code 3"):
        asyncio.run(actors.rollout.judge())


def test_a_turn_that_was_cut_is_closed_before_the_next_message(tokenizer: ModelTokenizer) -> None:
    actors = Actors(tokenizer)
    answered(actors.turn("look there", ASKED, max_tokens=4))
    result = {"role": "tool", "content": "7"}
    second = answered(actors.turn("done", [*ASKED, said("look"), result]))

    shown = tokenizer.decode(ids_of(second.prompt_ids))
    assert shown.endswith(
        "assistant\nlook<|im_end|>\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n"
    )
    assert branches(actors) == ()


def test_a_call_that_others_left_no_room_is_refused_with_all_later_ones(
    tokenizer: ModelTokenizer,
) -> None:
    actors = Actors(tokenizer, limit=6)
    for token_ids in ([5, 6], [5, 6, 7], [5, 6, 7]):
        actors.box.call({"token_ids": token_ids}, route="generate")
    actors.listen()
    first, second, third = actors.running

    actors.sample(third, [1, 2])
    actors.sample(first, [3, 4])
    actors.sample(second, [1])
    actors.say()
    actors.kill()

    assert [type(actors.box.replies[number]) for number in (1, 2, 3)] == [
        AgentAnswer,
        AgentError,
        AgentError,
    ]
    assert actors.rollout.num_turns == 1 and branches(actors) == ()


def test_a_long_history_is_kept_once_however_many_turns_go_on_from_it(
    tokenizer: ModelTokenizer,
) -> None:
    actors = Actors(tokenizer, prompt=10_000)
    history: list[dict[str, Any]] = [{"role": "user", "content": "a" * 5000}]
    for _ in range(6):
        actors.turn("look", history)
        history += [said("look"), {"role": "tool", "content": "7"}]

    assert num_long_texts(actors.rollout) == 1
    actors.rollout.end("ended", "", [])
    assert len(actors.rollout.turns) == 12
    assert actors.rollout.turns[0].content == "a" * 5000
    assert actors.rollout.text() == "look"


def num_long_texts(root: object) -> int:
    """Count the texts of at least 5000 characters that an object keeps."""
    kept, left = {id(root): root}, [root]
    while left:
        for child in gc.get_referents(left.pop()):
            if id(child) not in kept and not isinstance(child, (type, FunctionType, ModuleType)):
                kept[id(child)] = child
                left.append(child)
    return sum(isinstance(value, str) and len(value) >= 5000 for value in kept.values())
