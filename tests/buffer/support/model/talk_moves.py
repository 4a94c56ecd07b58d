"""Agents, their hosts and their actors in a history against the model."""

from __future__ import annotations

from typing import Any

from buffer import operations
from buffer.operations.values import BeatLine, CallLine, EndLine, ListenLine, ReplyLine, SayLine
from tests.buffer.support.model import conversations
from tests.buffer.support.model.actor_moves import fail_rows, lease, reap, send_beats, share
from tests.buffer.support.model.both import (
    EVERY_MS,
    LIMITS,
    LONGEST_MS,
    TIMEOUT_MS,
    TTL_MS,
    Grant,
    Modelled,
    Taken,
)
from tests.buffer.support.model.state import Conversation

AGENT_MS = 30_000
HOSTS = {"hal": "key of hal", "hob": "farm~hob"}
BODIES = (b"", b"a", b"ab", b"abc", b"abcd" * 4)


def want(h: Modelled) -> None:
    """Actors begin conversations, once or twice, early or late."""
    held = [(i, t) for i, t in h.model.tasks.items() if t.state == "L" and t.fence]
    rows = [(i, t.fence or 0, t.key or "") for i, t in h.rng.sample(held, min(len(held), 3))]
    if h.rng.random() < 0.3 or not rows:
        rows = [(grant.task, grant.fence, grant.key) for grant in h.some(2)]
    for task, fence, key in rows:
        _want(h, [(task, fence, h.rng.choice(BODIES))], key)


def _want(h: Modelled, asked: list[tuple[int, int, bytes]], key: str) -> None:
    h.same(
        operations.want_agents(asked, key),
        lambda: conversations.want_agents(h.model, asked, key),
    )


def take(h: Modelled) -> None:
    """A host asks for conversations."""
    name = h.rng.choice(list(HOSTS))
    known = [taken.ticket for taken in h.taken if taken.key == HOSTS[name]]
    newest = max(known, default=0) if h.rng.random() < 0.8 else h.rng.choice([0, *known])
    _take(h, name, newest)


def _take(h: Modelled, name: str, newest: int) -> None:
    asked: dict[str, Any] = {"n": h.rng.randint(1, 3), "ttl_ms": TTL_MS, "key": HOSTS[name]}
    asked |= {"newest": newest, "most_bytes": h.rng.choice([10**6, 10**6, 10])}
    answer = h.same(
        operations.take_conversations(name, **asked),
        lambda: conversations.take_conversations(h.model, name, **asked),
    )
    if answer is not None:
        h.taken += [Taken(t.task_id, t.ticket, HOSTS[name]) for t in answer.tickets]
        del h.taken[:-40]


def call(h: Modelled) -> None:
    """Calls that follow, come again, leave a gap, or are not what was stored."""
    for taken in _some(h):
        talk = _talk(h, taken.task)
        so_far, rng = len(talk.calls), h.rng
        number = max(1, so_far + rng.choice([1, 1, 1, 1, 0, -1, 2]))
        parent = rng.choice([0, so_far, so_far, rng.randint(0, so_far + 1)])
        size = len(talk.body(parent)) if parent <= so_far else 0
        keep = max(0, rng.choice([0, size, size, size - 1, size + 1]))
        line = CallLine(taken.task, taken.ticket, number, parent, keep, rng.choice(BODIES))
        if number <= so_far and rng.random() < 0.6:
            line = CallLine(taken.task, taken.ticket, number, *talk.calls[number - 1])
        most = rng.choice([10**6, 10**6, 10**6, 12])
        _call(h, line, taken.key, most)


def _call(h: Modelled, line: CallLine, key: str, most: int) -> None:
    limits = {"most_calls": LIMITS.max_calls, "most_open": LIMITS.max_open_calls, "most": most}
    h.same(
        operations.add_calls([line], key, max_bytes=most),
        lambda: conversations.add_calls(h.model, [line], key, **limits),
    )


def say(h: Modelled) -> None:
    """Replies with chunks that fit, overlap or leave a gap; to calls open, answered and unknown."""
    rng, lines = h.rng, []
    talks = h.model.conversations
    talking = [i for i in talks if h.model.tasks[i].fence]
    if rng.random() < 0.9:
        talking = [i for i in talking if talks[i].calls]
    for i in rng.sample(talking, min(len(talking), 3)):
        task, talk = h.model.tasks[i], h.model.conversations[i]
        length, fence = task.length or 0, task.fence or 0
        offset, tokens = max(0, length + rng.choice([0, 0, 0, 0, -1, -2, 1])), rng.randint(0, 3)
        if rng.random() < 0.1:
            offset, tokens = 0, length + rng.randint(0, 2)
        chunk = f"<{i} {fence} {offset}+{tokens}>".encode() if tokens else b""
        first = rng.choice([fence, fence, fence, task.last_fence or 0])
        fence += rng.choice([0] * 9 + [1])
        beat = BeatLine(i, fence, offset, tokens, chunk, task.key or "", first_fence=first)
        beat = beat._replace(last_fence=rng.choice([first, fence]))
        number = rng.randint(0 if rng.random() < 0.1 else 1, len(talk.calls) + 1)
        open_calls = [n for n in range(1, len(talk.calls) + 1) if n not in talk.replies]
        if open_calls and rng.random() < 0.7:
            number = rng.choice(open_calls)
        turn_end = rng.choice([0, max(0, offset + tokens + rng.choice([0, 0, 0, -1, 1]))])
        ticket = (talk.ticket or 0) + rng.choice([0] * 15 + [1])
        lines.append(SayLine(beat, ticket, number, turn_end, rng.choice(BODIES[1:3])))
    lines += [lines[-1]] if lines and rng.random() < 0.3 else []
    limits = {"ttl_ms": TTL_MS, "max_attempts": rng.randint(2, 3)}
    limits |= {"progress_timeout_ms": rng.choice([TIMEOUT_MS, 0])}
    limits |= {"max_bytes": rng.choice([10**6, 10**6, 60])}
    limits |= {"longest_ms": rng.choice([0, LONGEST_MS])}
    h.same(
        operations.say_replies(lines, **limits),
        lambda: conversations.say_replies(h.model, lines, **limits),
    )


def hear(h: Modelled) -> None:
    """Hosts ask for replies, after what was said, and after what never was."""
    for taken in _some(h):
        _hear(h, taken, _heard(h, taken))


def _heard(h: Modelled, taken: Taken) -> int:
    """The stamp of a reply, or now and then one that the store does not have."""
    stamps = [stamp for stamp, _ in _talk(h, taken.task).replies.values()]
    lost = h.rng.random() < 0.06
    return max([0, *stamps]) + 1 if lost else h.rng.choice([0, *stamps, *stamps])


def _hear(h: Modelled, taken: Taken, heard: int) -> None:
    line = ReplyLine(taken.task, taken.ticket, heard)
    asked = {"ttl_ms": TTL_MS, "max_attempts": h.rng.randint(2, 3)}
    asked |= {"agent_ms": h.rng.choice([AGENT_MS, AGENT_MS, AGENT_MS, 1000])}
    asked |= {"most_bytes": h.rng.choice([10**6, 10**6, 67])}
    h.same(
        operations.read_replies([line], taken.key, **asked),
        lambda: conversations.read_replies(h.model, [line], taken.key, **asked),
    )


def listen(h: Modelled) -> None:
    """Actors ask for calls; some know another agent."""
    grants = h.some(3)
    if h.rng.random() < 0.8:
        talks = h.model.conversations
        grants = [Grant(i, 0, "", "") for i in h.rng.sample(list(talks), min(len(talks), 2))]
    for grant in grants:
        task, talk = h.model.tasks.get(grant.task), _talk(h, grant.task)
        fence, key = grant.fence, grant.key
        if task is not None and task.fence and h.rng.random() < 0.7:
            fence, key = task.fence, task.key or ""
        known = h.rng.choice([0, talk.ticket or 0, talk.ticket or 0])
        known += h.rng.choice([0] * 15 + [1])
        have, said = h.rng.randint(0, len(talk.calls) + 1), len(talk.replies)
        said = h.rng.choice([0, said, said, said + (h.rng.random() < 0.1)])
        line = ListenLine(grant.task, fence, known, have, said)
        most = h.rng.randint(2, 3)
        _listen(h, line, key, most)


def _listen(h: Modelled, line: ListenLine, key: str, most: int) -> None:
    asked = {"max_attempts": most, "most_bytes": h.rng.choice([10**6, 10**6, 3, 70])}
    h.same(
        operations.read_calls([line], key, **asked),
        lambda: conversations.read_calls(h.model, [line], key, **asked),
    )


def end(h: Modelled) -> None:
    """Rewards, and ends."""
    for taken in _some(h):
        why = h.rng.choice(["", "", "", "", "ended", "died"])
        number = h.rng.choice([0, 0, 1, 2, len(_talk(h, taken.task).calls) + 1])
        reward = h.rng.choice([b"", b"1", b"0.5"])
        place = (taken.task, taken.ticket, _heard(h, taken))
        end_line = EndLine(*place, why, number, h.rng.randint(1, 5), reward)
        bounds = h.rng.choice([(10**6, 10**6), (10**6, 10**6), (12, 12), (10**6, 5), (10**6, 8)])
        _end(h, end_line, taken.key, bounds)
        task, talk = h.model.tasks.get(taken.task), _talk(h, taken.task)
        if task is not None and task.fence and talk.why is not None:
            have = h.rng.randint(0, len(talk.calls))
            line = ListenLine(taken.task, task.fence, talk.ticket or 0, have)
            _listen(h, line, task.key or "", 3)
            _take(h, talk.host, (talk.ticket or 0) - 1)


def _end(h: Modelled, line: EndLine, key: str, bounds: tuple[int, int]) -> None:
    most, most_rewards = bounds
    max_attempts = h.rng.randint(2, 3)
    h.same(
        operations.end_conversations(
            [line],
            key,
            max_bytes=most,
            max_reward_bytes=most_rewards,
            max_attempts=max_attempts,
        ),
        lambda: conversations.end_conversations(
            h.model,
            [line],
            key,
            most=most,
            most_rewards=most_rewards,
            max_attempts=max_attempts,
        ),
    )


def end_and_fail(h: Modelled) -> None:
    """Agents end, and their actors have no use for what they said."""
    talks = h.model.conversations
    for i in [i for i in talks if h.model.tasks[i].state == "L" and h.model.tasks[i].fence][:2]:
        talk, task = talks[i], h.model.tasks[i]
        if talk.ticket is not None:
            _end(h, EndLine(i, talk.ticket, 0, "died"), talk.key, (10**6, 10**6))
        fail_rows(h, [(i, task.fence or 0)], task.key or "")


def news(h: Modelled) -> None:
    """A broker looks for changes."""
    since = max(0, h.model.news + h.rng.choice([0, -1, -5, -100, 3]))
    h.same(operations.read_news(since), lambda: conversations.read_news(h.model, since))


def talk_a_while(h: Modelled) -> None:
    """Some turns of a conversation, one after the other."""
    lease(h)
    want(h)
    take(h)
    for _ in range(h.rng.randint(2, 12)):
        h.rng.choice([call, call, call, say, say, say, hear, listen, end, wait])(h)


def fall_silent(h: Modelled) -> None:
    """Agents of one host end without a call, one after the other."""
    name = h.rng.choice(list(HOSTS))
    for _ in range(h.rng.randint(3, 6)):
        lease(h)
        want(h)
        _take(h, name, h.model.fence)
        for i, talk in list(h.model.conversations.items()):
            if (talk.host, talk.why) == (name, None) and not talk.calls:
                _end(h, EndLine(i, talk.ticket or 0, 0, "died"), talk.key, (10**6, 10**6))
        h.set_clock(h.model.now_us + 1000 * h.rng.choice([0, 900, 1100, 5000]))


def wait(h: Modelled) -> None:
    """For longer than a lease may stand still, beside a broker that reaps; then a call comes."""
    talks = h.model.conversations
    leased = [i for i in talks if h.model.tasks[i].state == "L" and h.model.tasks[i].fence]
    if not leased or h.rng.random() < 0.5:
        return
    i = h.rng.choice(leased)
    limits = {"ttl_ms": TTL_MS, "progress_timeout_ms": TIMEOUT_MS, "max_attempts": 3}
    limits |= {"max_bytes": 10**6, "longest_ms": h.rng.choice([0, LONGEST_MS])}
    for _ in range(h.rng.choice([2, 6, 12, 24])):
        h.set_clock(h.model.now_us + 1000 * EVERY_MS)
        reap(h)
        if i not in talks:
            return
        task, talk = h.model.tasks[i], talks[i]
        send_beats(h, [BeatLine(i, task.fence or 0, key=task.key or "")], limits)
        _hear(h, Taken(i, talk.ticket or 0, talk.key), 0)
    h.rng.choice([call, share])(h)
    h.rng.choice([say, share])(h)


def _some(h: Modelled) -> list[Taken]:
    rng = h.rng
    known = h.taken[-6:]
    if rng.random() < 0.85:
        talks = h.model.conversations
        known = [Taken(i, t.ticket, t.key) for i, t in talks.items() if t.ticket is not None]
    return [
        _forged(h, taken) if rng.random() < 0.06 else taken
        for taken in rng.sample(known, min(len(known), 2))
    ]


def _forged(h: Modelled, taken: Taken) -> Taken:
    task = max(0, taken.task + h.rng.choice([0, 1, -1]))
    ticket = taken.ticket + h.rng.choice([0, 1, -1])
    return Taken(task, ticket, h.rng.choice([taken.key, *HOSTS.values()]))


def _talk(h: Modelled, task: int) -> Conversation:
    return h.model.conversations.get(task, Conversation(b"", 0))
