"""The door answers the real client of OpenAI as OpenAI's own server does."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

import httpx
import openai
import pytest

from agents import door
from agents.call_log import OpenCall
from agents.conversation import AgentEnd
from agents.requests import RequestError, read_chat, read_reward
from broker.protocol.agent_calls import AgentAnswer, AgentError, CalledTool
from broker.protocol.messages import TaskVerdict, Verdict, Verdicts
from configs.errors import DeadlineError, RecordError, RefusedError
from tests.agents.support.mailbox import logprobs, tokens
from tests.agents.support.opened_door import opened
from tests.waiting import until

ASK: Any = [{"role": "user", "content": "2+3?"}]
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def never():
    released = asyncio.Event()

    async def model(_call, number):
        await released.wait()
        return AgentAnswer("stop", 5, 2, text=f"late {number}")

    return model, released


async def use_tools(call, _number):
    body = json.loads(call.body)
    if body["messages"][-1]["role"] == "tool":
        return AgentAnswer("stop", 9, 1, text="5")
    assert body["tools"] == [ADD]
    calls = (CalledTool("call_a", "add", '{"a":2}'), CalledTool("call_b", "add", '{"a":3}'))
    return AgentAnswer("tool_calls", 5, 7, reasoning="two sums", tool_calls=calls)


async def with_tokens(_call, _number):
    return AgentAnswer(
        "length",
        3,
        2,
        text="né",
        prompt_ids=tokens(1, 2, 3),
        completion_ids=tokens(7, 8),
        logprobs=logprobs(-0.5, -1.0),
        pieces=(b"n", "é".encode()),
    )


def test_a_completion_has_text_finish_reason_and_usage():
    async def story():
        async with opened() as here:
            client = here.client(here.conversation())
            answer = await client.chat.completions.create(model="any", messages=ASK)

            (choice,) = answer.choices
            assert answer.usage is not None
            assert (choice.message.content, choice.finish_reason) == ("hello 1", "stop")
            assert answer.usage.model_dump(include={"prompt_tokens", "completion_tokens"}) == {
                "prompt_tokens": 5,
                "completion_tokens": 2,
            }
            assert answer.model == "any"

    asyncio.run(story())


@pytest.mark.parametrize("is_streamed", [False, True])
def test_two_tools_are_called_in_one_turn_and_their_results_lead_to_a_text(is_streamed):
    async def story():
        async with opened(use_tools) as here:
            conversation = here.conversation()
            client = here.client(conversation)

            async def ask(messages):
                options = {"model": "m", "messages": messages, "tools": [ADD]}
                if not is_streamed:
                    return (await client.chat.completions.create(**options)).choices[0].message
                async with client.chat.completions.stream(**options) as stream:
                    return (await stream.get_final_completion()).choices[0].message

            first = await ask(ASK)
            assert [(call.id, call.function.arguments) for call in first.tool_calls] == [
                ("call_a", '{"a":2}'),
                ("call_b", '{"a":3}'),
            ]
            assert first.content is None
            assert first.model_extra["reasoning_content"] == "two sums"
            results = [
                {"role": "tool", "tool_call_id": call.id, "content": "2"}
                for call in first.tool_calls
            ]
            last = await ask([*ASK, first.model_dump(exclude_none=True), *results])

            assert last.content == "5"
            box = here.mailbox.boxes[1]
            parent, keep, tail = box.lines[1]
            assert parent == 1
            assert box.bodies[1] == box.bodies[0][:keep] + tail
            assert keep > len(box.bodies[0]) - len("]}") - 1

    asyncio.run(story())


@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": True}}])
def test_usage_comes_with_the_last_choice_or_in_a_chunk_of_its_own_if_that_is_asked_for(options):
    async def story():
        async with opened() as here:
            client = here.client(here.conversation())
            stream = await client.chat.completions.create(
                model="m", messages=ASK, stream=True, **options
            )
            *chunks, last = [chunk async for chunk in stream]

            first, end = (*chunks, last)[:2]
            assert (first.choices[0].delta.content, first.usage) == ("hello 1", None)
            assert end.choices[0].finish_reason == "stop"
            assert last.usage is not None and last.usage.total_tokens == 7
            assert bool(last.choices) is not bool(options)

    asyncio.run(story())


def test_token_ids_and_logprobs_come_where_they_are_asked_for():
    async def story():
        async with opened(with_tokens) as here:
            client = here.client(here.conversation())
            answer = await client.chat.completions.create(
                model="m", messages=ASK, logprobs=True, extra_body={"return_token_ids": True}
            )
            choice = answer.choices[0]

            assert answer.model_dump()["prompt_token_ids"] == [1, 2, 3]
            assert choice.model_dump()["token_ids"] == [7, 8]
            assert choice.logprobs is not None and choice.logprobs.content is not None
            assert [(one.token, one.logprob) for one in choice.logprobs.content] == [
                ("n", -0.5),
                ("é", -1.0),
            ]
            plain = await client.chat.completions.create(model="m", messages=[*ASK, *ASK])
            assert plain.choices[0].logprobs is None
            assert "prompt_token_ids" not in plain.model_dump()

    asyncio.run(story())


def test_tokens_go_in_and_come_out():
    async def story():
        async with opened(with_tokens) as here:
            conversation = here.conversation()
            async with httpx.AsyncClient() as client:
                answer = await client.post(
                    f"{here.url(conversation)}/inference/v1/generate",
                    headers={"x-api-key": conversation.key},
                    json={
                        "token_ids": [1, 2, 3],
                        "model": "m",
                        "sampling_params": {"temperature": 0.3, "max_tokens": 2, "logprobs": 1},
                    },
                )
            (choice,) = answer.json()["choices"]

            assert choice["token_ids"] == [7, 8]
            assert choice["finish_reason"] == "length"
            assert [one["logprob"] for one in choice["logprobs"]["content"]] == [-0.5, -1.0]
            (body,) = here.mailbox.boxes[1].bodies
            assert body == b'generate\n{"max_tokens":2,"token_ids":[1,2,3]}'

    asyncio.run(story())


def test_the_task_and_the_models_can_be_read():
    async def story():
        async with opened() as here:
            conversation = here.conversation()
            async with httpx.AsyncClient(
                headers={"Authorization": f"Bearer {conversation.key}"}
            ) as bare:
                task = await bare.get(f"{here.url(conversation)}/task")
            client = here.client(conversation)
            models = await client.models.list()
            one = await client.models.retrieve(models.data[0].id)
            other = await client.models.retrieve("owner/other")

            assert task.json() == {"question": "2+3?"}
            assert [model.id for model in models.data] == ["nyala"]
            assert one == models.data[0]
            assert other.id == "owner/other"

    asyncio.run(story())


def test_the_newest_reward_of_a_call_has_the_highest_number_and_comes_again_with_the_end(
    monkeypatch,
):
    """The store keeps the highest, and may have been set back since it was told."""
    asked = []

    async def story():
        async with opened() as here:
            store = here.mailbox.end

            async def end(request, *, deadline_s=0.0):
                asked.append([(e.number, e.order, e.reward, e.why) for e in request.ends])
                return await store(request)

            monkeypatch.setattr(here.mailbox, "end", end)
            conversation = here.conversation()
            async with httpx.AsyncClient(headers={"x-api-key": conversation.key}) as plain:
                url = f"{here.url(conversation)}/reward"
                for reward in (0.25, 0.5):
                    await plain.post(url, json={"reward": reward})
                await plain.post(url, json={"done": True})

    asyncio.run(story())

    first, second = (0, 1, 0.25, ""), (0, 2, 0.5, "")
    assert asked == [[first], [second], [second, (0, 0, None, "ended")]]


def test_a_reward_without_an_answer_comes_again_with_the_end(monkeypatch):
    """The store may have it or not, and the agent need not ask twice."""

    async def story():
        async with opened() as here:
            store = here.mailbox.end
            monkeypatch.setattr("agents.conversation.ENDS_AT_A_TIME", 2)
            asked = []

            async def end(request, *, deadline_s=0.0):
                asked.append([(e.number, e.reward, e.why) for e in request.ends])
                if len(asked) in {1, 2, 3}:
                    raise DeadlineError("no answer within 60 s")
                return await store(request)

            monkeypatch.setattr(here.mailbox, "end", end)
            conversation = here.conversation()
            client = here.client(conversation)
            await client.chat.completions.create(model="m", messages=ASK)
            async with httpx.AsyncClient(headers={"x-api-key": conversation.key}) as plain:
                url = f"{here.url(conversation)}/reward"
                for reward in ({"reward": 1}, {"reward": 0.25, "call": 1}, {"reward": 2}):
                    assert (await plain.post(url, json=reward)).status_code == 503
                assert (await plain.post(url, json={"done": True})).status_code == 200

            assert asked[3:] == [[(0, 2.0, ""), (1, 0.25, "")], [(0, None, "ended")]]

    asyncio.run(story())


def test_an_end_that_overtakes_a_reward_has_it(monkeypatch):
    async def story():
        async with opened() as here:
            store, answered = here.mailbox.end, asyncio.Event()

            async def end(request, *, deadline_s=0.0):
                if not any(line.why for line in request.ends):
                    await answered.wait()
                return await store(request)

            monkeypatch.setattr(here.mailbox, "end", end)
            conversation = here.conversation()
            wanted = read_reward(b'{"reward": 1}')
            rewarding = asyncio.create_task(conversation.reward(wanted))
            await asyncio.sleep(0)
            await conversation.finish(AgentEnd("died", "it left"))
            answered.set()
            await rewarding

            ends = here.mailbox.boxes[conversation.ticket.task_id].ends
            assert [(line.reward, line.why) for line in ends] == [(1.0, ""), (None, "died")]

    asyncio.run(story())


@pytest.mark.parametrize("fault", ["malformed", "lost call"])
def test_a_reward_that_is_refused_at_last_does_not_take_the_end_with_it(monkeypatch, fault):
    """While no broker answers nobody judges a reward, and the agent was told to try again."""

    async def story():
        async with opened() as here:
            store, asked = here.mailbox.end, []

            async def end(request, *, deadline_s=0.0):
                asked.append([line.reward for line in request.ends])
                if len(asked) == 1:
                    raise DeadlineError("no answer within 60 s")
                if None not in asked[-1] or len(request.ends) > 1:
                    if fault == "malformed":
                        raise RefusedError("a reward is too long", code="malformed")
                    lines = [TaskVerdict(line.task_id, Verdict.GAP) for line in request.ends]
                    return Verdicts(tuple(lines))
                return await store(request)

            monkeypatch.setattr(here.mailbox, "end", end)
            conversation = here.conversation()
            with pytest.raises(RequestError, match="try again"):
                await conversation.reward(read_reward(b'{"reward": 1}'))
            await asyncio.wait_for(conversation.finish(AgentEnd("ended")), 20)

            assert asked == [[1.0], [1.0, None], [None]]
            (last,) = here.mailbox.boxes[conversation.ticket.task_id].ends
            assert last.why == "ended" and conversation.is_settled

    asyncio.run(story())


def test_rewards_are_for_a_call_or_the_whole_and_the_last_request_may_end_it():
    async def story():
        async with opened() as here:
            conversation = here.conversation()
            client = here.client(conversation)
            answer = await client.chat.completions.create(model="m", messages=ASK)
            async with httpx.AsyncClient(headers={"x-api-key": conversation.key}) as plain:
                url = f"{here.url(conversation)}/reward"
                part = await plain.post(url, json={"call": answer.id, "reward": 0.5})
                unknown = await plain.post(url, json={"call": "chatcmpl-2", "reward": 1})
                whole = {"reward": 2, "parts": {"exact": 1}, "done": True}
                last = await plain.post(url, json=whole)
                late = await plain.post(url, json=whole)

            statuses = [part.status_code, unknown.status_code, last.status_code, late.status_code]
            assert statuses == [200, 400, 200, 410]
            ends = here.mailbox.boxes[1].ends
            assert [(e.number, e.reward, dict(e.parts), e.why) for e in ends] == [
                (1, 0.5, {}, ""),
                (0, 2.0, {"exact": 1.0}, ""),
                (0, None, {}, "ended"),
            ]

    asyncio.run(story())


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RecordError("a message must be at most 1 bytes"), 400),
        (RefusedError("bytes of a reward must be at most 4096", code="malformed"), 400),
        (RefusedError("EndRequest must come from host", code="role"), 503),
        (DeadlineError("EndRequest must be answered within 60 s"), 503),
    ],
)
def test_a_reward_is_to_be_sent_again_only_where_that_may_help(error, status, monkeypatch):
    async def refuse(_request, *, deadline_s=0.0):
        raise error

    async def story():
        async with opened() as here:
            monkeypatch.setattr(here.mailbox, "end", refuse)
            conversation = here.conversation()
            async with httpx.AsyncClient(headers={"x-api-key": conversation.key}) as plain:
                answer = await plain.post(f"{here.url(conversation)}/reward", json={"reward": 1})

            assert answer.status_code == status
            assert str(error) in answer.json()["error"]["message"]
            assert not conversation.over.is_set()

    asyncio.run(story())


def test_an_error_of_the_actor_has_its_status_and_is_no_answer_to_a_retry():
    refusals = iter([AgentError(400, "prompt must be at most 10 tokens", "messages")])

    async def model(_call, number):
        return next(refusals, AgentAnswer("stop", 5, 2, text=f"hello {number}"))

    async def story():
        async with opened(model) as here:
            client = here.client(here.conversation())
            with pytest.raises(openai.BadRequestError, match="at most 10 tokens") as failed:
                await client.chat.completions.create(model="m", messages=ASK)
            again = await client.chat.completions.create(
                model="m", messages=ASK, extra_headers={"x-stainless-retry-count": "1"}
            )

            assert failed.value.param == "messages"
            assert again.choices[0].message.content == "hello 2"

    asyncio.run(story())


def test_a_stream_is_kept_alive_and_late_errors_are_events(monkeypatch):
    monkeypatch.setattr(door, "KEEP_ALIVE_S", 0.05)
    released = asyncio.Event()

    async def model(_call, _number):
        await released.wait()
        return AgentError(503, "no engine")

    async def story():
        async with opened(model) as here:
            conversation = here.conversation()
            seen = b""
            async with httpx.AsyncClient() as client:
                body = {"model": "m", "messages": ASK, "stream": True}
                headers = {"x-api-key": conversation.key}
                url = f"{here.url(conversation)}/v1/chat/completions"
                async with client.stream("POST", url, json=body, headers=headers) as answer:
                    async for part in answer.aiter_raw():
                        seen += part
                        if seen.count(b": waiting") >= 3:
                            released.set()

            assert answer.status_code == 200
            assert b'"message":"no engine"' in seen

    asyncio.run(story())


def test_a_retry_of_an_open_call_waits_for_the_same_reply():
    async def story():
        model, released = never()
        async with opened(model) as here:
            client = here.client(here.conversation(), max_retries=2, timeout=0.4)
            asking = asyncio.create_task(client.chat.completions.create(model="m", messages=ASK))
            await asyncio.sleep(1.0)  # the SDK has given up once, and asks again
            released.set()
            answer = await asking

            assert answer.choices[0].message.content == "late 1"
            assert len(here.mailbox.boxes[1].lines) == 1

    asyncio.run(story())


def test_a_client_that_leaves_does_not_lose_its_call():
    async def story():
        model, released = never()
        async with opened(model) as here:
            conversation = here.conversation()
            client = here.client(conversation)
            asking = asyncio.create_task(client.chat.completions.create(model="m", messages=ASK))
            await until(lambda: len(here.mailbox.boxes[1].lines) == 1)
            asking.cancel()
            await until(
                lambda: conversation.open_calls.num_waiting == 1 and not waits(conversation)
            )
            released.set()
            again = await client.chat.completions.create(model="m", messages=ASK)
            next_one = await client.chat.completions.create(model="m", messages=ASK)

            assert again.choices[0].message.content == "late 1"
            assert next_one.choices[0].message.content == "late 2"

    asyncio.run(story())


def test_a_stream_waits_for_its_call_from_its_first_second_to_its_last(monkeypatch):
    """A like request would join a call that nobody seems to wait for."""
    monkeypatch.setattr(door, "KEEP_ALIVE_S", 0.05)

    async def story():
        model, released = never()
        async with opened(model) as here:
            conversation = here.conversation()
            counted = OpenCall.waiting
            begun = []

            def waiting(call):
                begun.append(call.number)
                return counted(call)

            monkeypatch.setattr(OpenCall, "waiting", waiting)
            client = here.client(conversation)
            stream = await client.chat.completions.create(model="m", messages=ASK, stream=True)
            assert waits(conversation)
            released.set()
            assert [chunk async for chunk in stream]
            await until(lambda: not waits(conversation))

            assert begun == [1]

    asyncio.run(story())


def test_the_door_answers_others_while_it_reads_a_long_body(monkeypatch):
    read_on = threading.Event()

    def slow(body):
        assert read_on.wait(30)
        return read_chat(body)

    monkeypatch.setattr(door, "read_chat", slow)

    async def story():
        async with opened() as here:
            conversation = here.conversation()
            client = here.client(conversation)
            long: Any = [{"role": "user", "content": "x" * door.SHORT_BODY_BYTES}]
            asking = asyncio.create_task(client.chat.completions.create(model="m", messages=long))
            async with asyncio.timeout(20):
                await asyncio.sleep(0.5)
                assert (await client.models.list()).data
            read_on.set()
            assert (await asking).choices[0].message.content == "hello 1"

    asyncio.run(story())


def waits(conversation) -> bool:
    return any(call.num_waiting for call in conversation.open_calls)


def test_equal_requests_side_by_side_are_calls_of_their_own():
    async def story():
        model, released = never()
        async with opened(model) as here:
            client = here.client(here.conversation())
            asking = [
                asyncio.create_task(client.chat.completions.create(model="m", messages=ASK))
                for _ in range(3)
            ]
            await until(lambda: len(here.mailbox.boxes[1].lines) == 3)
            released.set()
            answers = [await one for one in asking]

            texts = {answer.choices[0].message.content for answer in answers}
            assert texts == {"late 1", "late 2", "late 3"}

    asyncio.run(story())


def test_a_retry_of_a_request_without_a_call_is_a_new_call():
    """Else some of many equal requests would get copies of the others' answers."""
    failures = iter([AgentError(500, "no engine")])

    async def model(_call, number):
        await asyncio.sleep(0.2)
        return next(failures, AgentAnswer("stop", 5, 2, text=f"hello {number}"))

    async def story():
        async with opened(model) as here:
            client = here.client(here.conversation(), max_retries=8)
            asked = [client.chat.completions.create(model="m", messages=ASK) for _ in range(40)]
            answers = [answer.choices[0].message.content for answer in await asyncio.gather(*asked)]

            assert len(set(answers)) == 40  # more than may be open at a time

    asyncio.run(story())


def test_an_idempotency_key_names_a_call():
    async def story():
        async with opened() as here:
            client = here.client(here.conversation())

            async def ask(content):
                answer = await client.chat.completions.create(
                    model="m",
                    messages=[{"role": "user", "content": content}],
                    extra_headers={"Idempotency-Key": "k"},
                )
                return answer.choices[0].message.content

            assert [await ask("a"), await ask("a")] == ["hello 1", "hello 1"]
            with pytest.raises(openai.UnprocessableEntityError, match="must be new"):
                await ask("b")

    asyncio.run(story())


def test_a_conversation_that_the_store_has_lost_is_over_for_its_agent():
    async def story():
        model, _ = never()
        async with opened(model) as here:
            conversation = here.conversation()
            client = here.client(conversation, max_retries=2)
            asking = asyncio.create_task(client.chat.completions.create(model="m", messages=ASK))
            await until(lambda: len(here.mailbox.boxes[1].lines) == 1)
            here.mailbox.lose(1)
            began = time.monotonic()
            with pytest.raises(openai.APIStatusError, match="over: lost") as failed:
                await asking
            with pytest.raises(openai.APIStatusError, match="over: lost"):
                await client.chat.completions.create(model="m", messages=ASK)

            assert failed.value.status_code == 410
            assert time.monotonic() - began < 5  # no SDK repeats it

    asyncio.run(story())
