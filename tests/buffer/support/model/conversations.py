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
from tests.buffer.support.model.state import Conversation, Model


def want_agents(model: Model, rows: Sequence[tuple[int, int, bytes]], key: str) -> list[str]:
    """Once a task has a mailbox it keeps it; tokens without one are cut."""
    verdicts = []
    for i, fence, payload in rows:
        verdict = model.judge(i, fence, key)
        if verdict == "OK" and i not in model.conversations and model.tasks[i].length:
            model.cut(i)
            return_uncharged(model, i)
            verdict = "STALE"
        elif verdict == "OK" and i not in model.conversations:
            model.conversations[i] = Conversation(payload, model.now_ms)
            model.note_news(i)
        verdicts.append(verdict)
    return verdicts


def take_conversations(
    model: Model, incarnation: str, *, n: int, ttl_ms: int, key: str
) -> TakeAnswer:
    """Those that wait for longest, under one ticket."""
    if model.state != "RUNNING":
        return TakeAnswer("DONE" if model.state == "ENDED" else "WAIT", [])
    waiting = {i: talk for i, talk in model.conversations.items() if talk.ticket is None}
    taken = sorted(waiting, key=lambda i: (waiting[i].wanted_ms, str(i)))[:n]
    if not taken:
        return TakeAnswer("EMPTY", [])
    model.fence = max(model.fence + 1, model.now_us)
    for i in taken:
        talk = waiting[i]
        talk.ticket, talk.host, talk.key = model.fence, incarnation, key
        talk.deadline_ms = model.now_ms + ttl_ms
    tickets = [
        TakenConversation(i, model.fence, model.tasks[i].spec or b"", waiting[i].payload)
        for i in taken
    ]
    return TakeAnswer("OK", tickets)


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
    beat, number, reply = line
    i = beat.task_id
    verdict = model.judge(i, beat.fence, beat.key)
    if verdict != "OK":
        return verdict, 0
    length = model.tasks[i].length or 0
    talk = model.conversations.get(i)
    if talk is None or not 1 <= number <= len(talk.calls):
        return "UNCALLED", length
    if number in talk.replies and talk.replies[number][1] != reply:
        return "OTHER", length
    verdict, length = renew(model, beat, limits)
    if verdict != "OK":
        return verdict, length
    if beat.offset + beat.num_tokens > length:
        return "GAP", length
    if number in talk.replies:
        return "DUP", length
    talk.replies[number] = (max(talk.newest + 1, model.now_us), reply)
    model.note_news(i)
    return "OK", length


def read_replies(
    model: Model, lines: Sequence[ReplyLine], key: str, *, ttl_ms: int, max_attempts: int
) -> list[RepliesAnswer]:
    """Renews tickets; a reply that was heard and is not stored ends a conversation."""
    answers = []
    for i, ticket, heard in lines:
        verdict = _judge(model, i, ticket, key)
        if verdict != "OK":
            answers.append(RepliesAnswer(verdict, 0, ()))
            continue
        talk = model.conversations[i]
        if heard and heard not in {stamp for stamp, _ in talk.replies.values()}:
            why = "the store lost a reply that its agent has heard"
            model.lose_conversation(i, max_attempts, why, key)
            answers.append(RepliesAnswer("GONE", 0, ()))
            continue
        if talk.why is None:
            talk.deadline_ms = model.now_ms + ttl_ms
        found = [MailboxReply(at, number, text) for number, (at, text) in talk.replies.items()]
        new = tuple(reply for reply in found if reply.stamp > heard)
        answers.append(RepliesAnswer("OK", len(talk.calls), new))
    return answers


def read_calls(
    model: Model, lines: Sequence[ListenLine], key: str, *, max_attempts: int
) -> list[CallsAnswer]:
    """Another ticket than the actor's is another agent's; a reply that it said may be lost."""
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
            calls = tuple(
                MailboxCall(*call, is_answered=number in talk.replies)
                for number, call in enumerate(talk.calls, 1)
            )
            rewards = talk.rewards if talk.why is not None else {}
            answer = CallsAnswer("OK", talk.ticket or 0, len(calls), talk.why or "", rewards)
            answers.append(answer._replace(calls=calls[have:]))
    return answers


def end_conversations(model: Model, lines: Sequence[EndLine], key: str) -> list[str]:
    """The last reward before the end counts."""
    verdicts = []
    for i, ticket, why, number, reward in lines:
        verdict = _judge(model, i, ticket, key)
        if verdict == "OK":
            talk = model.conversations[i]
            if talk.why is not None:
                verdict = "DUP"
            elif number > len(talk.calls):
                verdict = "GAP"
            else:
                talk.rewards |= {number: reward} if reward else {}
                if why:
                    talk.why, talk.opened_ms = why, model.now_ms
                    model.note_news(i)
        verdicts.append(verdict)
    return verdicts


def read_news(model: Model, newest: int) -> News:
    """A higher number than the store's is of a store that lost its last changes."""
    known = newest if newest <= model.news else 0
    talks = model.conversations
    changed = sorted((i for i in talks if talks[i].news > known), key=lambda i: talks[i].news)
    wanted = sum(talk.ticket is None for talk in talks.values())
    return News(model.news, wanted, changed)
