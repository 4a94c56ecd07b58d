"""Conversations of tasks with live agents: a mailbox of calls and replies beside a task's chunks.

    actor                          store                          host of agents
    want_agents      ────────────▶ wanted ◀────────────────────── take_conversations: a ticket
    read_calls       ◀──────────── calls ◀─────────────────────── add_calls
    say_replies      ────────────▶ chunk and reply ─────────────▶ read_replies: renews the ticket
    read_calls       ◀──────────── why, rewards ◀──────────────── end_conversations

An actor acts under the fence of its lease, a host under its ticket, each with the tag of its key.
Output commit: a reply is written by the call that stores its last tokens, or not at all. So the
next holder of a lease goes on with everything that an agent has heard.

A conversation that is lost, because its host or the store lost it, ends, and its task begins anew,
at most `max_attempts` times. Every call may be sent again when its reply was lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from buffer.record.codec import MAX_RECORD_BYTES

from . import leases
from .operation import (
    SLICE,
    Argument,
    Operation,
    Reply,
    ScriptCall,
    Steps,
    parse_beats,
    parse_verdicts,
    single,
    sliced,
)
from .values import (
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

Answer = TypeVar("Answer")

MAX_CALLS = 4096
"""Most calls of a conversation: the longest agents make hundreds."""

MAX_OPEN_CALLS = 32
"""Most calls of a conversation that wait for replies at a time: sub-agents make a few."""

MAX_REWARD_BYTES = 2**18
"""Most bytes of the rewards of a conversation's calls: one for each of them, without parts."""

PART_BYTES = 64
"""Bytes that a call or reply adds to an answer beside its own, as the scripts count them."""

MAX_ANSWER_BYTES = 2**20
"""Bytes of calls or replies in one answer, after which the rest waits for the next one."""


def want_agents(rows: Sequence[tuple[int, int, bytes]], key: str = "") -> Operation[list[str]]:
    """Have (task_id, fence, payload) tasks wait for agents; repeated, it changes nothing.

    Comes before a task's first token. A task that has tokens, and no mailbox any more, is STALE and
    begins anew.

    Args:
        rows: Tasks, and what their agents are told.
        key: Tag of the actor's key.
    """
    return sliced("want_agents", (key,), rows, parse_verdicts)


def take_conversations(
    incarnation: str,
    *,
    n: int,
    ttl_ms: int,
    key: str = "",
    newest: int = 0,
    most_bytes: int = MAX_ANSWER_BYTES,
) -> Operation[TakeAnswer]:
    """Give a host tickets for at most `n` conversations, those that wait for longest first.

    Args:
        incarnation: Incarnation of the host.
        n: Most conversations.
        ttl_ms: Time after which a ticket expires unless `read_replies` renews it.
        key: Tag of the host's key.
        newest: Newest ticket that the host knows, 0 = none; if it was given a newer one, the answer
            was lost, and is repeated.
        most_bytes: Bytes after which the other conversations are left to the next call.
    """

    def parse(reply: Reply) -> TakeAnswer:
        status, *rest = reply
        if status == b"RESTS":
            return TakeAnswer("RESTS", [], *rest)
        ticket = int(rest.pop(0)) if rest else 0
        tickets = [
            TakenConversation(int(task), ticket, spec, payload) for task, spec, payload in rest
        ]
        return TakeAnswer(status.decode(), tickets)

    arguments = (incarnation, key, min(n, SLICE), ttl_ms, most_bytes, newest)
    return single("take_conversations", arguments, parse)


def add_calls(
    lines: Sequence[CallLine], key: str = "", *, max_bytes: int = MAX_RECORD_BYTES
) -> Operation[list[CallVerdict]]:
    """Append calls, each once; one verdict per line, in order.

    Args:
        lines: Calls.
        key: Tag of the host's key.
        max_bytes: Most bytes of a conversation's calls and replies, and of one body.
    """
    head = (key, MAX_CALLS, MAX_OPEN_CALLS, max_bytes)
    return sliced(
        "add_calls",
        head,
        lines,
        lambda replies: [CallVerdict(*pair) for pair in parse_beats(replies)],
    )


def say_replies(
    lines: Sequence[SayLine],
    *,
    ttl_ms: int,
    progress_timeout_ms: int = 120_000,
    max_attempts: int = 3,
    max_bytes: int = MAX_RECORD_BYTES,
    longest_ms: int = 0,
) -> Operation[list[BeatVerdict]]:
    """Store replies, each together with the chunk that brings its last token, or neither.

    The arguments and verdicts are those of `leases.beat`; and DUP: it was said before, OTHER:
    another reply was, UNCALLED: the store has no such call. An actor that has read calls under
    another ticket is STALE, and the task begins anew.
    """
    head = (ttl_ms, leases.MAX_CHUNKS, progress_timeout_ms, max_attempts, max_bytes, longest_ms)

    def steps() -> Steps[list[BeatVerdict]]:
        replies: list[Reply] = []
        for start in range(0, len(lines), SLICE):
            numbers: list[str] = []
            parts: list[bytes] = []
            for beat, ticket, number, turn_end, reply in lines[start : start + SLICE]:
                task, fence, at, n, chunk, key, oldest, first, last = beat
                of_beat = f"{task} {fence} {at} {n} {oldest} {first} {last}"
                numbers.append(f"{of_beat} {ticket} {number} {turn_end} {key}")
                parts += [chunk, reply] if n else [reply]
            replies.append((yield ScriptCall("say_replies", (*head, "\n".join(numbers), *parts))))
        return parse_beats(replies)

    return Operation("say_replies", steps)


def read_replies(
    lines: Sequence[ReplyLine],
    key: str = "",
    *,
    ttl_ms: int,
    agent_ms: int,
    max_attempts: int = 3,
    most_bytes: int = MAX_ANSWER_BYTES,
) -> Operation[list[RepliesAnswer]]:
    """Renew a host's tickets, and read the replies after those that its agents have heard.

    A reply that an agent has heard and that the store has lost ends the conversation: GONE.

    Args:
        lines: Conversations, and the newest reply that each agent has heard.
        key: Tag of the host's key.
        ttl_ms: Time from now after which the tickets expire.
        agent_ms: Longest time of a conversation, after which it is lost.
        max_attempts: Conversations that may be lost before their task is a dead letter.
        most_bytes: Bytes after which the other replies are left to the next call.
    """

    def parse(line: Reply) -> RepliesAnswer:
        verdict, calls, *stored = line
        replies = tuple(map(_stored_reply, stored[::2], stored[1::2]))
        return RepliesAnswer(verdict.decode(), calls, replies)

    def num_bytes(answer: RepliesAnswer) -> int:
        return sum(len(reply.reply) + PART_BYTES for reply in answer.replies)

    head = (key, ttl_ms, agent_ms, max_attempts)
    return _bounded("read_replies", head, lines, most_bytes, (parse, num_bytes))


def read_calls(
    lines: Sequence[ListenLine],
    key: str = "",
    *,
    max_attempts: int = 3,
    most_bytes: int = MAX_ANSWER_BYTES,
) -> Operation[list[CallsAnswer]]:
    """Read the calls after those that an actor has, and how conversations ended.

    A conversation under another ticket than the actor's is another agent's: STALE, and the task
    begins anew. One with fewer replies than the actor knows has lost some: STALE, and the next
    holder of the lease says them again.

    Args:
        lines: Tasks, the calls that their actors have, and the replies that they know to be stored.
        key: Tag of the actor's key.
        max_attempts: Conversations that may be lost before their task is a dead letter.
        most_bytes: Bytes after which the other calls are left to the next call.
    """

    def num_bytes(answer: CallsAnswer) -> int:
        calls = sum(len(call.tail) + PART_BYTES for call in answer.calls)
        return calls + len(answer.why) + sum(map(len, answer.rewards.values()))

    return _bounded("read_calls", (key, max_attempts), lines, most_bytes, (_calls, num_bytes))


def end_conversations(
    lines: Sequence[EndLine],
    key: str = "",
    *,
    max_bytes: int = MAX_RECORD_BYTES,
    max_reward_bytes: int = MAX_REWARD_BYTES,
    max_attempts: int = 3,
) -> Operation[list[str]]:
    """Store rewards and ends; after the end nothing changes any more, and the verdict is DUP.

    A reply that an agent has heard and that the store has lost ends the conversation: GONE.

    Args:
        lines: Rewards and ends.
        key: Tag of the host's key.
        max_bytes: Most bytes of a conversation, rewards of its calls included; else FULL.
        max_reward_bytes: Most bytes of the rewards of its calls.
        max_attempts: Conversations that may be lost before their task is a dead letter.
    """
    head = (key, max_bytes, min(max_bytes, max_reward_bytes), max_attempts)
    return sliced("end_conversations", head, lines, parse_verdicts)


def read_news(newest: int) -> Operation[News]:
    """Read which conversations have changed since the change of this number."""

    def parse(reply: Reply) -> News:
        return News(reply[0], reply[1], [int(task) for task in reply[2]])

    return single("read_news", (newest,), parse)


def _bounded(
    script: str,
    head: tuple[Argument, ...],
    lines: Sequence[tuple[int, ...]],
    most_bytes: int,
    reading: tuple[Callable[[Reply], Answer], Callable[[Answer], int]],
) -> Operation[list[Answer]]:
    """Read in slices, all of which have so many bytes together, and one part more at most."""
    parse, num_bytes = reading

    def steps() -> Steps[list[Answer]]:
        answers: list[Answer] = []
        room = most_bytes
        for start in range(0, len(lines), SLICE):
            part = [number for line in lines[start : start + SLICE] for number in line]
            reply = yield ScriptCall(script, (*head, room, *part))
            new = [parse(line) for line in reply]
            room = max(0, room - sum(map(num_bytes, new)))
            answers += new
        return answers

    return Operation(script, steps)


def _stored_reply(stamp: bytes, member: bytes) -> MailboxReply:
    number, _, reply = member.partition(b"\n")
    return MailboxReply(int(stamp), int(number), reply)


def _calls(line: Reply) -> CallsAnswer:
    if len(line) == 1:
        return CallsAnswer(line[0].decode())
    verdict, ticket, num_calls, why, rewards, *calls = line
    return CallsAnswer(
        verdict.decode(),
        int(ticket),
        num_calls,
        why.decode(),
        {int(rewards[i]): rewards[i + 1] for i in range(0, len(rewards), 2)},
        tuple(_stored_call(text, bool(is_answered)) for text, is_answered in calls),
    )


def _stored_call(text: bytes, is_answered: bool) -> MailboxCall:
    head, _, tail = text.partition(b"\n")
    parent, keep = head.split()
    return MailboxCall(int(parent), int(keep), tail, is_answered)
