"""Operations on conversations with live agents, as the store must carry them out."""

from __future__ import annotations

from collections.abc import Sequence

from buffer.operations.values import (
    BeatVerdict,
    CallLine,
    CallsAnswer,
    CallVerdict,
    EndLine,
    ListenLine,
    MailboxCall,
    MailboxReply,
    News,
    RepliesAnswer,
    ReplyLine,
    SayLine,
    TakeAnswer,
    TakenConversation,
)
from tests.buffer.support.model.leases import BeatLimits, renew, return_uncharged
from tests.buffer.support.model.state import Conversation, HostOfAgents, Model


def want_agents(model: Model, rows: Sequence[tuple[int, int, bytes]], key: str) -> list[str]:
    """Once a task has a mailbox it keeps it; tokens without one are cut."""
    verdicts = []
    for i, fence, payload in rows:
        verdict = model.judge(i, fence, key)
        if verdict == "OK" and model.tasks[i].teacher is not None:
            verdict = "STALE"
        elif verdict == "OK" and i not in model.conversations and model.tasks[i].length:
            model.cut(i)
            return_uncharged(model, i)
            verdict = "STALE"
        elif verdict == "OK" and i not in model.conversations:
            model.conversations[i] = Conversation(payload, model.now_ms)
            model.note_news(i)
        verdicts.append(verdict)
    return verdicts


def take_conversations(
    model: Model, incarnation: str, *, n: int, ttl_ms: int, key: str, newest: int, most_bytes: int
) -> TakeAnswer:
    """Those that wait for longest, under one ticket; an answer that was lost once more.

    After three agents without a call a host gets one conversation, then none for a second, for two
    seconds after the fourth, and for a minute at most.
    """
    if model.state != "RUNNING":
        return TakeAnswer("DONE" if model.state == "ENDED" else "WAIT", [])
    talks, host = model.conversations, model.hosts.get((incarnation, key), HostOfAgents())
    if host.ticket is not None and host.ticket > newest:
        again = [i for i in host.tasks if i in talks and talks[i].ticket == host.ticket]
        again = [i for i in again if not talks[i].calls and talks[i].why is None]
        if again:
            return _give(model, again, host.ticket, ttl_ms)
    waiting = [i for i, talk in talks.items() if talk.ticket is None]
    waiting.sort(key=lambda i: (talks[i].wanted_ms, str(i)))
    if not waiting:
        return TakeAnswer("EMPTY", [])
    num_silent = host.num_silent or 0
    if num_silent >= 3:
        left_ms = (host.rests_until_ms or 0) - model.now_ms
        if 0 < left_ms <= 60_000:  # else the clock was set back
            return TakeAnswer("RESTS", [], num_silent, left_ms)
        n = 1
        host.rests_until_ms = model.now_ms + min(1000 * 2 ** (num_silent - 3), 60_000)
    taken: list[int] = []
    for i in waiting[:n]:
        if most_bytes > 0:
            taken.append(i)
        most_bytes -= len(model.tasks[i].spec or b"") + len(talks[i].payload)
    model.fence = max(model.fence + 1, model.now_us)
    host.ticket, host.tasks = model.fence, taken
    model.hosts[incarnation, key] = host
    for i in taken:
        talks[i].ticket, talks[i].host, talks[i].key = model.fence, incarnation, key
    return _give(model, taken, model.fence, ttl_ms)


def _give(model: Model, tasks: Sequence[int], ticket: int, ttl_ms: int) -> TakeAnswer:
    for i in tasks:
        model.conversations[i].deadline_ms = model.now_ms + ttl_ms
    specs = [(i, model.tasks[i].spec or b"", model.conversations[i].payload) for i in tasks]
    return TakeAnswer("OK", [TakenConversation(i, ticket, spec, told) for i, spec, told in specs])


_LOST_REPLY = "the store lost a reply that its agent has heard"


def _has_lost(talk: Conversation, heard: int) -> bool:
    return heard > 0 and heard not in {stamp for stamp, _ in talk.replies.values()}


def _judge(model: Model, i: int, ticket: int, key: str) -> str:
    talk = model.conversations.get(i)
    if talk is None:
        return "GONE"
    return "OK" if (talk.ticket, talk.key) == (ticket, key) else "STALE"


def add_calls(
    model: Model, lines: Sequence[CallLine], key: str, *, most_calls: int, most_open: int, most: int
) -> list[CallVerdict]:
    """Each number once, without a gap, within the bounds."""
    answers = []
    for i, ticket, number, parent, keep, tail in lines:
        verdict = _judge(model, i, ticket, key)
        if verdict != "OK":
            answers.append(CallVerdict(verdict, 0))
            continue
        talk, bounds = model.conversations[i], (most_calls, most_open, most)
        verdict = _why_not(talk, number, (parent, keep, tail), bounds)
        if verdict == "OK":
            if not talk.num_open:
                talk.opened_ms = model.now_ms
            talk.calls.append((parent, keep, tail))
            model.note_news(i)
            if number == 1 and (host := model.hosts.get((talk.host, talk.key))) is not None:
                host.num_silent = host.rests_until_ms = None
        answers.append(CallVerdict(verdict, len(talk.calls)))
    return answers


def _why_not(
    talk: Conversation, number: int, call: tuple[int, int, bytes], bounds: tuple[int, int, int]
) -> str:
    (parent, keep, tail), (most_calls, most_open, most_bytes) = call, bounds
    if number <= len(talk.calls):
        return "DUP" if talk.calls[number - 1] == call else "OTHER"
    if number > len(talk.calls) + 1:
        return "GAP"
    if talk.why is not None:
        return "ENDED"
    if talk.num_open >= most_open:
        return "BUSY"
    is_long = max(talk.num_bytes, keep) + len(tail) > most_bytes
    if len(talk.calls) >= most_calls or is_long:
        return "FULL"
    is_known = parent <= len(talk.calls) and keep <= len(talk.body(parent))
    return "OK" if is_known else "OTHER"


def say_replies(
    model: Model,
    lines: Sequence[SayLine],
    *,
    ttl_ms: int,
    progress_timeout_ms: int,
    max_attempts: int,
    max_bytes: int,
    longest_ms: int,
) -> list[BeatVerdict]:
    """A chunk and the reply that it ends with, or neither."""
    limits = BeatLimits(ttl_ms, progress_timeout_ms, max_attempts, max_bytes, longest_ms)
    return [BeatVerdict(*_say(model, line, limits)) for line in lines]


def _say(model: Model, line: SayLine, limits: BeatLimits) -> tuple[str, int]:
    beat, ticket, number, turn_end, reply = line
    i = beat.task_id
    verdict = model.judge(i, beat.fence, beat.key)
    if verdict != "OK":
        return verdict, 0
    length = model.tasks[i].length or 0
    talk = model.conversations.get(i)
    if talk is None or talk.ticket != ticket:
        model.lose_conversation(i, limits.max_attempts, "the store lost its agent", "")
        return "STALE", 0
    if not 1 <= number <= len(talk.calls):
        return "UNCALLED", length
    if number in talk.replies and talk.replies[number][1] != reply:
        return "OTHER", length
    verdict, length = renew(model, beat, limits)
    if verdict != "OK":
        return verdict, length
    if turn_end > length:
        return "GAP", length
    if number in talk.replies:
        return "DUP", length
    talk.replies[number] = (max(talk.newest + 1, model.now_us), reply)
    model.note_news(i)
    return "OK", length


def read_replies(
    model: Model,
    lines: Sequence[ReplyLine],
    key: str,
    *,
    ttl_ms: int,
    agent_ms: int,
    max_attempts: int,
    most_bytes: int,
) -> list[RepliesAnswer]:
    """Renews tickets; a reply that was heard and is not stored ends a conversation.

    So does too much time since its host took it, or since a recovery.
    """
    answers = []
    for i, ticket, heard in lines:
        verdict = _judge(model, i, ticket, key)
        if verdict != "OK":
            answers.append(RepliesAnswer(verdict, 0, ()))
            continue
        talk = model.conversations[i]
        why = None
        lasted_ms = model.now_ms - max(ticket / 1000, model.grace_until_ms or 0)
        if _has_lost(talk, heard):
            why = _LOST_REPLY
        elif talk.why is None and lasted_ms > agent_ms:
            why = "its agent did not end in time"
        if why is not None:
            model.note_silence(i)
            model.lose_conversation(i, max_attempts, why, key)
            answers.append(RepliesAnswer("GONE", 0, ()))
            continue
        if talk.why is None:
            talk.deadline_ms = model.now_ms + ttl_ms
        found = [MailboxReply(at, number, text) for number, (at, text) in talk.replies.items()]
        new: list[MailboxReply] = []
        for reply in found:
            if reply.stamp > heard and most_bytes > 0:
                new.append(reply)
                most_bytes -= len(b"%d\n%s" % reply[1:]) + 64
        answers.append(RepliesAnswer("OK", len(talk.calls), tuple(new)))
    return answers


def read_calls(
    model: Model, lines: Sequence[ListenLine], key: str, *, max_attempts: int, most_bytes: int
) -> list[CallsAnswer]:
    """Another ticket than the actor's is another agent's; a reply that it said may be lost.

    The end comes behind all calls.
    """
    answers = []
    for i, fence, known, have, said in lines:
        verdict, talk = model.judge(i, fence, key), model.conversations.get(i)
        if verdict != "OK":
            answers.append(CallsAnswer(verdict))
        elif known and (talk is None or talk.ticket != known):
            model.lose_conversation(i, max_attempts, "the store lost its agent", "")
            answers.append(CallsAnswer("STALE"))
        elif talk is None:
            answers.append(CallsAnswer("UNCALLED"))
        elif len(talk.replies) < said:
            return_uncharged(model, i)
            answers.append(CallsAnswer("STALE"))
        else:
            calls: list[MailboxCall] = []
            for number, call in enumerate(talk.calls[have:], have + 1):
                if most_bytes > 0:
                    calls.append(MailboxCall(*call, is_answered=number in talk.replies))
                    most_bytes -= len(b"%d %d\n%s" % call) + 64
            answer = CallsAnswer("OK", talk.ticket or 0, len(talk.calls), calls=tuple(calls))
            if talk.why is not None and have + len(calls) >= len(talk.calls) and most_bytes > 0:
                rewards = {n: reward for n, (_, reward) in talk.rewards.items()}
                answer = answer._replace(why=talk.why, rewards=rewards)
                most_bytes -= len(talk.why) + talk.num_reward_bytes + 64
            answers.append(answer)
    return answers


def end_conversations(
    model: Model,
    lines: Sequence[EndLine],
    key: str,
    *,
    most: int,
    most_rewards: int,
    max_attempts: int,
) -> list[str]:
    """Of each call the reward with the highest order before the end counts.

    A reply that was heard and is not stored ends a conversation.
    """
    verdicts = []
    for i, ticket, heard, why, number, order, reward in lines:
        verdict = _judge(model, i, ticket, key)
        if verdict == "OK":
            talk = model.conversations[i]
            if talk.why is not None:
                verdict = "DUP"
            elif _has_lost(talk, heard):
                model.lose_conversation(i, max_attempts, _LOST_REPLY, key)
                verdict = "GONE"
            elif number > len(talk.calls):
                verdict = "GAP"
            else:
                refused = _reward(talk, number, order, reward, (most, most_rewards))
                if why and refused != "FULL":
                    model.note_silence(i)
                    talk.why, talk.opened_ms = why, model.now_ms
                    model.note_news(i)
                else:
                    verdict = refused or "OK"
        verdicts.append(verdict)
    return verdicts


def _reward(
    talk: Conversation, number: int, order: int, reward: bytes, bounds: tuple[int, int]
) -> str | None:
    """Why a reward is not written; that of the whole always fits."""
    if not reward:
        return None
    if number in talk.rewards and talk.rewards[number][0] >= order:
        return "DUP"
    before = dict(talk.rewards)
    talk.rewards[number] = order, reward
    if number and (talk.num_bytes > bounds[0] or talk.num_reward_bytes > bounds[1]):
        talk.rewards = before
        return "FULL"
    return None


def read_news(model: Model, newest: int) -> News:
    """A higher number than the store's is of a store that lost its last changes."""
    known = newest if newest <= model.news else 0
    talks = model.conversations
    changed = sorted((i for i in talks if talks[i].news > known), key=lambda i: talks[i].news)
    wanted = sum(talk.ticket is None for talk in talks.values())
    return News(model.news, wanted, changed)
