"""One process for all conversations of a host: each is a line of its input."""

from __future__ import annotations

import asyncio
import json
import sys

from agents.host import AgentHost
from broker.protocol.agent_calls import AgentAnswer
from configs.settings import AgentSettings
from tests.agents.support.mailbox import TwinMailbox
from tests.waiting import until

ASKS_ALL = """
import json, os, sys, threading, urllib.request

def post(url, key, body):
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))

def converse(url, key, task):
    body = {"model": "m", "messages": [{"role": "user", "content": task["q"]}]}
    said = post(url + "/chat/completions", key, body)["choices"][0]["message"]["content"]
    reward = {"reward": 1.0, "parts": {"pid": os.getpid() % 1000}, "done": said == "5"}
    post(url.removesuffix("/v1") + "/reward", key, reward)

for line in sys.stdin:
    threading.Thread(target=converse, kwargs=json.loads(line)).start()
"""


async def says_five(_call, _number):
    return AgentAnswer("stop", 5, 1, text="5")


def play(code: str, *, tasks: int, stop_after: int | None = None, **settings) -> TwinMailbox:
    """Let a host hold conversations; without `stop_after` until there are no more."""
    mailbox = TwinMailbox(says_five, tasks=tasks, payload=b'{"q": "2+3?"}')
    mailbox.is_done = stop_after is None
    agents = AgentSettings(**{"max_conversations": 2, "serves_many": True, **settings})
    host = AgentHost(mailbox, agents, drain_s=0.5, command=(sys.executable, "-c", code))

    async def story():
        stop = asyncio.Event()
        running = asyncio.create_task(host.run(stop))
        if stop_after is not None:
            await until(lambda: len(mailbox.boxes) == stop_after)
            stop.set()
        async with asyncio.timeout(60):
            await running
        await mailbox.close()

    asyncio.run(story())
    return mailbox


def ends(mailbox: TwinMailbox) -> dict[int, tuple[str, str]]:
    return {
        task: (end.why, end.text)
        for task, box in mailbox.boxes.items()
        for end in box.ends
        if end.why
    }


def test_one_process_holds_all_conversations():
    mailbox = play(ASKS_ALL, tasks=5)

    assert ends(mailbox) == dict.fromkeys(range(1, 6), ("ended", ""))
    pids = {end.parts["pid"] for box in mailbox.boxes.values() for end in box.ends if not end.why}
    assert len(pids) == 1


def test_a_crash_ends_the_conversations_under_way_and_the_next_one_starts_it_again():
    code = ASKS_ALL.replace(
        "for line in sys.stdin:\n",
        "for line in sys.stdin:\n    if '/conversations/1-' in line: print('no'); os._exit(3)\n",
    )

    mailbox = play(code, tasks=3, max_conversations=1)

    died = ("died", "exit code 3; its last output:\nno\n")
    assert ends(mailbox) == {1: died, 2: ("ended", ""), 3: ("ended", "")}


def test_a_process_that_exits_too_early_has_died():
    mailbox = play("input()", tasks=1)

    assert ends(mailbox)[1][0] == "died"
    assert "before it ended its conversations" in ends(mailbox)[1][1]


def test_an_agent_gives_up_one_conversation_and_says_why():
    code = ASKS_ALL.replace(
        '    reward = {"reward": 1.0,',
        """    if '/1-' in url:
        return post(url.removesuffix("/v1") + "/reward", key, {"error": "no tool\\x1b"})
    reward = {"reward": 1.0,""",
    )

    mailbox = play(code, tasks=3)

    assert ends(mailbox) == {1: ("died", "no tool\\x1b"), 2: ("ended", ""), 3: ("ended", "")}
    assert [end.reward for end in mailbox.boxes[1].ends] == [None]


def test_a_conversation_that_takes_too_long_ends_alone():
    code = ASKS_ALL.replace(
        "def converse(url, key, task):\n",
        "def converse(url, key, task):\n    if '/1-' in url: return\n",
    )

    mailbox = play(code, tasks=3, timeout_s=2.0)

    assert ends(mailbox) == {
        1: ("timeout", "no end within 2 s"),
        2: ("ended", ""),
        3: ("ended", ""),
    }


def test_a_host_that_is_told_to_stop_ends_the_process():
    mailbox = play("import sys, time; sys.stdin.readline(); time.sleep(60)", tasks=2, stop_after=2)

    assert ends(mailbox) == dict.fromkeys((1, 2), ("host", "its host was stopped"))


def test_lines_have_what_a_hand_started_agent_is_told(tmp_path):
    seen = tmp_path / "line"
    code = f"import sys; open({str(seen)!r}, 'w').write(sys.stdin.readline())"

    play(code, tasks=1)

    line = json.loads(seen.read_text())
    assert set(line) == {"url", "key", "task"}
    assert line["url"].endswith("/v1")
    assert line["task"] == {"q": "2+3?"}
