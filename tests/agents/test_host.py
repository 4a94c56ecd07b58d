"""A host runs as many agents as it has places, and each ends its own conversation alone."""

from __future__ import annotations

import asyncio
import json
import sys

import httpx
import pytest
import structlog
from msgspec import structs

from agents import conversation
from agents.host import AgentHost, StartPause, first_of
from broker.protocol.agent_calls import AgentAnswer
from broker.protocol.conversation_messages import TakeReply
from configs.errors import DeadlineError, RefusedError
from configs.settings import AgentSettings
from tests.agents.support.mailbox import TwinMailbox
from tests.waiting import until

ASKS = """
import json, os, urllib.request
task = json.loads(os.environ["NYALA_TASK"])
body = {"model": "m", "messages": [{"role": "user", "content": task["q"]}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps(body).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
)
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
"""


REWARDS = """
import os, urllib.request
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"].removesuffix("/v1") + "/reward",
    b'{"reward": 1.0}',
    {"x-api-key": os.environ["OPENAI_API_KEY"]},
)
urllib.request.urlopen(request)
"""


def host_of(mailbox, code=ASKS, *, show=None, drain_s=0.5, **settings):
    agents = AgentSettings(**{"max_conversations": 2, **settings})
    command = (sys.executable, "-c", code)
    return AgentHost(mailbox, agents, drain_s=drain_s, command=command, show=show)


def ends(mailbox) -> dict[int, tuple[str, str]]:
    return {
        task: (end.why, end.text)
        for task, box in mailbox.boxes.items()
        for end in box.ends
        if end.why
    }


def test_agents_ask_are_answered_and_end():
    most = 0

    async def model(call, _number):
        nonlocal most
        waiting = sum(not box.is_over for box in mailbox.boxes.values())
        most = max(most, waiting)
        assert json.loads(call.body)["messages"] == [{"role": "user", "content": "2+3?"}]
        return AgentAnswer("stop", 5, 1, text="5")

    async def story():
        await host_of(mailbox).run(asyncio.Event())
        await mailbox.close()

    mailbox = TwinMailbox(model, tasks=5, payload=b'{"q": "2+3?"}')
    mailbox.is_done = True
    asyncio.run(story())

    assert ends(mailbox) == dict.fromkeys(range(1, 6), ("ended", ""))
    assert all(len(box.lines) == 1 for box in mailbox.boxes.values())
    assert most == 2


def test_an_agent_beyond_its_memory_ends_only_its_own_conversation():
    code = """
import os, time
print("here")
if os.environ["OPENAI_BASE_URL"].split("/")[-2].startswith("1-"):
    block = bytearray(120 << 20)
    time.sleep(60)
time.sleep(3)
"""

    async def story():
        await host_of(mailbox, code, memory_mb=64).run(asyncio.Event())

    mailbox = TwinMailbox(tasks=2)
    mailbox.is_done = True
    asyncio.run(story())

    found = ends(mailbox)
    assert found[1][0] == "memory"
    assert found[1][1].endswith("its last output:\nhere\n") or "here" in found[1][1]
    assert found[2] == ("ended", "")


def test_a_host_that_is_told_to_stop_takes_no_more_and_gives_a_grace():
    code = "import os, time; time.sleep(1 if '/1-' in os.environ['OPENAI_BASE_URL'] else 60)"

    async def story():
        stop = asyncio.Event()
        running = asyncio.create_task(host_of(mailbox, code, drain_s=3.0).run(stop))
        await until(lambda: len(mailbox.boxes) == 2)
        stop.set()
        await running

    mailbox = TwinMailbox(tasks=3)
    asyncio.run(story())

    assert ends(mailbox) == {1: ("ended", ""), 2: ("host", "its host was stopped")}
    assert mailbox.wanted == [3]


def test_an_end_is_sent_until_the_run_has_it_and_its_ticket_is_kept(monkeypatch):
    """No answer for as long as a client waits was once the end of the conversation's reward."""
    monkeypatch.setattr(conversation, "BUSY_S", 0.3)
    tries: list[int] = []
    kept: list[int] = []

    class Away(TwinMailbox):
        async def end(self, request, *, deadline_s=0.0):
            if any(end.why for end in request.ends):
                tries.append(len(request.ends))
                if len(tries) < 4:
                    raise DeadlineError("the broker is away")
            return await super().end(request)

        async def hear(self, request, *, deadline_s=0.0):
            if tries and not self.boxes[1].is_over:
                kept.extend(line.task_id for line in request.conversations)
            return await super().hear(structs.replace(request, wait_s=0.1))

    async def story():
        await host_of(mailbox, REWARDS).run(asyncio.Event())

    mailbox = Away(tasks=1)
    mailbox.is_done = True
    asyncio.run(story())

    assert [end.reward for end in mailbox.boxes[1].ends] == [1.0, None]
    assert ends(mailbox) == {1: ("ended", "")}
    assert tries == [2, 2, 2, 2], "each with the reward before it"
    assert 1 in kept


def test_a_host_stops_in_time_although_the_run_does_not_answer(monkeypatch):
    monkeypatch.setattr(conversation, "END_TRY_S", 0.5)

    class Away(TwinMailbox):
        async def end(self, request, *, deadline_s=0.0):
            assert deadline_s < 60
            await asyncio.sleep(deadline_s)
            raise DeadlineError("the broker is away")

    async def story():
        stop = asyncio.Event()
        code = "import os, time; time.sleep(0 if '/1-' in os.environ['OPENAI_BASE_URL'] else 60)"
        running = asyncio.create_task(host_of(mailbox, code, drain_s=1.0).run(stop))
        await until(lambda: len(mailbox.boxes) == 2)
        stop.set()
        async with asyncio.timeout(20):
            await running

    mailbox = Away(tasks=2)
    with structlog.testing.capture_logs() as lines:
        asyncio.run(story())

    assert ends(mailbox) == {}
    lost = {line["task"] for line in lines if "was not stored" in line["event"]}
    assert lost == {"1-101", "2-102"}


def test_a_host_of_a_run_that_has_ended_waits_for_no_agent():
    class Ended(TwinMailbox):
        async def take(self, request, *, deadline_s=0.0):
            return await super().take(request) if self.wanted else TakeReply("DONE", (), 15.0)

    async def story():
        async with asyncio.timeout(30):
            host = host_of(mailbox, "import time; time.sleep(60)", drain_s=60.0)
            await host.run(asyncio.Event())

    mailbox = Ended(tasks=1)
    asyncio.run(story())

    assert ends(mailbox) == {1: ("host", "the run has ended")}


def test_a_loop_that_cancels_its_request_can_be_cancelled_itself():
    """That cancellation was once taken for the request's, and the host never ended."""

    async def request():
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.2)

    async def story():
        over = asyncio.create_task(asyncio.sleep(0.05))
        loop = asyncio.create_task(first_of(request(), over))
        await asyncio.sleep(0.1)  # the request ends, cancelled
        loop.cancel()
        await asyncio.wait({loop})

        assert loop.cancelled()

    asyncio.run(story())


def test_an_agent_may_be_started_by_hand():
    lines: list[str] = []

    async def story():
        running = asyncio.create_task(host_of(mailbox, show=lines.append).run(asyncio.Event()))
        await until(lambda: lines)
        line = json.loads(lines[0])
        async with httpx.AsyncClient(headers={"x-api-key": line["key"]}) as client:
            body = {"messages": [{"role": "user", "content": line["task"]["q"]}]}
            said = await client.post(f"{line['url']}/chat/completions", json=body)
            await client.post(
                f"{line['url'].removesuffix('/v1')}/reward", json={"reward": 1, "done": True}
            )
        await running
        await mailbox.close()
        return said.json()["choices"][0]["message"]["content"]

    mailbox = TwinMailbox(tasks=1, payload=b'{"q": "2+3?"}')
    mailbox.is_done = True

    assert asyncio.run(story()) == "hello 1"
    assert [(end.reward, end.why) for end in mailbox.boxes[1].ends] == [(1.0, ""), (None, "ended")]


def test_a_host_that_the_run_refuses_ends_with_the_reason():
    class Refusing(TwinMailbox):
        async def take(self, request, *, deadline_s=0.0):
            raise RefusedError("the key of this host was revoked", code="role")

    with pytest.raises(RefusedError, match="was revoked"):
        asyncio.run(host_of(Refusing()).run(asyncio.Event()))


def test_an_agent_of_a_lost_conversation_is_ended():
    async def story():
        stop = asyncio.Event()
        running = asyncio.create_task(host_of(mailbox, "import time; time.sleep(60)").run(stop))
        await until(lambda: mailbox.boxes)
        mailbox.lose(1)
        stop.set()
        async with asyncio.timeout(20):
            await running

    mailbox = TwinMailbox(tasks=1)
    asyncio.run(story())

    assert ends(mailbox) == {}


def test_a_host_that_rests_waits_and_says_why():
    asked = []

    class Resting(TwinMailbox):
        async def take(self, request, *, deadline_s=0.0):
            asked.append((request.newest, asyncio.get_running_loop().time()))
            if len(asked) == 2:
                return TakeReply("RESTS", (), 15.0, num_silent=4, rest_s=1.5)
            return await super().take(request)

    async def story():
        await host_of(mailbox, max_conversations=3).run(asyncio.Event())
        await mailbox.close()

    mailbox = Resting(tasks=1, payload=b'{"q": "2+3?"}')
    mailbox.is_done = True
    with structlog.testing.capture_logs() as lines:
        asyncio.run(story())

    (first, _), (second, then), (third, later), *_ = asked
    assert (first, second, third) == (0, 101, 101)
    assert later - then >= 1.5
    assert [line["agents"] for line in lines if "rests" in line["event"]] == [4]


def test_a_host_that_cannot_start_agents_takes_fewer_and_says_so_once(monkeypatch):
    monkeypatch.setattr("agents.host.FIRST_PAUSE_S", 0.2)
    asked = []

    class Watched(TwinMailbox):
        async def take(self, request, *, deadline_s=0.0):
            asked.append((request.n, asyncio.get_running_loop().time()))
            return await super().take(request)

    async def story():
        agents = AgentSettings(max_conversations=4)
        host = AgentHost(mailbox, agents, drain_s=0.5, command=("/none/agent",))
        await host.run(asyncio.Event())
        await mailbox.close()

    mailbox = Watched(tasks=7)
    mailbox.is_done = True
    with structlog.testing.capture_logs() as lines:
        asyncio.run(story())

    assert [n for n, _ in asked[:4]] == [4, 1, 1, 1]
    times = [at for _, at in asked]
    assert times[3] - times[2] >= 0.2  # .4 s, at most half of it less
    why = "its host could not start it: /none/agent cannot be started: No such file or directory"
    assert ends(mailbox) == dict.fromkeys(range(1, 8), ("host", why))
    said = [line for line in lines if line["log_level"] in {"warning", "error"}]
    assert [line["event"] for line in said] == [
        "this host cannot start its agents, and tries again"
    ]


def test_pauses_of_a_host_that_cannot_start_agents_double_up_to_a_minute():
    now = [100.0]
    pause = StartPause(lambda: now[0], lambda: 0.0)
    pauses = []
    for _ in range(8):
        began, now[0] = now[0], now[0] + 0.5
        pause.note_failure(began, "no memory")
        pause.note_failure(began, "no memory")
        pauses.append(pause.left_s)
        now[0] += pause.left_s

    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    pause.note_start(100.0)
    assert pause.has_failed
    pause.note_start(now[0])
    assert (pause.has_failed, pause.left_s) == (False, 0.0)
    for _ in range(1100):  # half a day
        began, now[0] = now[0], now[0] + 60
        pause.note_failure(began, "no program")
    assert pause.left_s == 60
    shorter = StartPause(lambda: 0.0, lambda: 1.0)
    shorter.note_failure(0.0, "no memory")
    assert shorter.left_s == 0.5


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "localhost:0"])
def test_agents_are_given_an_address_that_can_be_asked(listen):
    lines: list[str] = []

    async def story():
        host = host_of(mailbox, show=lines.append, listen=listen)
        running = asyncio.create_task(host.run(asyncio.Event()))
        await until(lambda: lines)
        line = json.loads(lines[0])
        root = line["url"].removesuffix("/v1")
        async with httpx.AsyncClient(headers={"x-api-key": line["key"]}, trust_env=False) as client:
            answer = await client.post(f"{root}/reward", json={"reward": 1, "done": True})
        await running
        await mailbox.close()
        return httpx.URL(root).host, answer.status_code

    mailbox = TwinMailbox(tasks=1)
    mailbox.is_done = True
    asked, status = asyncio.run(story())

    assert status == 200
    assert asked not in {"0.0.0.0", "::"}


def test_calls_that_a_store_was_set_back_behind_are_sent_again():
    is_set_back = False

    async def model(_call, number):
        nonlocal is_set_back
        if not is_set_back:
            is_set_back = True
            box = mailbox.boxes[1]
            box.lines.clear()
            box.bodies.clear()
            await asyncio.Event().wait()
        return AgentAnswer("stop", 5, 1, text=f"again {number}")

    async def story():
        await host_of(mailbox).run(asyncio.Event())
        await mailbox.close()

    mailbox = TwinMailbox(model, tasks=1, payload=b'{"q": "2+3?"}')
    mailbox.is_done = True
    asyncio.run(story())

    assert ends(mailbox) == {1: ("ended", "")}
    assert len(mailbox.boxes[1].replies) == 1
