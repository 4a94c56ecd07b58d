"""Validation of messages: permissions, ranges, and records that are possible in this run.

Runs before the store is touched, so a message that fails here has changed nothing.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import NamedTuple

from broker.protocol.agent_calls import AgentAnswer, decode_reply
from broker.protocol.conversation_messages import (
    MAX_REWARD,
    CallRequest,
    EndRequest,
    ListenRequest,
    RepliesRequest,
    SayRequest,
    TakeRequest,
    WantRequest,
)
from broker.protocol.messages import (
    MAX_LINES,
    BeatRequest,
    Bye,
    DrainRequest,
    Enrol,
    FailRequest,
    Hello,
    LeaseRequest,
    Refusal,
    ReleaseRequest,
    RevokeRequest,
    StatusRequest,
    Submission,
    SubmitRequest,
)
from broker.transport.allow_list import AllowListEntry, Role
from buffer.operations.conversations import MAX_CALLS
from buffer.operations.keys import EVAL_BASE
from buffer.operations.values import version_number
from buffer.record.episode import PolicyVersion
from buffer.record.rules import EpisodeLimits
from buffer.record.summaries import Summary, summaries_of_chunks, summaries_of_records
from buffer.record.wire import MAX_INCARNATION_CHARS
from configs.errors import RecordError, StoreError, quoted
from configs.settings import RunSettings

# --------------------------------------------------------------------------------------------------
# Permissions: the requests that a broker accepts from each role; no role includes another.
#
# | role      | may                                              | may not |
# | --------- | ------------------------------------------------ | ------- |
# | actor     | hello, lease, beat, submit, release, fail, bye,  | status, revoke, drain |
# |           | want, listen, say                                | |
# | enrolment | enrol                                            | everything else |
# | host      | take, call, hear, end                            | everything else |
# | observer  | status                                           | everything else |
# | operator  | status, revoke, drain                            | make episodes |
#
# A message that is no request of any role is refused to all.

HOST_REQUESTS = (TakeRequest, CallRequest, RepliesRequest, EndRequest)
"""Requests of hosts, which say no HELLO: their tickets are what they may do."""
CONVERSATION_REQUESTS = (*HOST_REQUESTS, WantRequest, ListenRequest, SayRequest)

PERMISSIONS: dict[Role, frozenset[type]] = {
    Role.ACTOR: frozenset(
        {
            Hello,
            LeaseRequest,
            BeatRequest,
            SubmitRequest,
            ReleaseRequest,
            FailRequest,
            Bye,
            WantRequest,
            ListenRequest,
            SayRequest,
        }
    ),
    Role.ENROLMENT: frozenset({Enrol}),
    Role.HOST: frozenset(HOST_REQUESTS),
    Role.OBSERVER: frozenset({StatusRequest}),
    Role.OPERATOR: frozenset({StatusRequest, RevokeRequest, DrainRequest}),
}

ADMIN_REQUESTS = (StatusRequest, RevokeRequest, DrainRequest, Enrol)
"""Requests that `admin.py` answers; all others are for `service.py`."""


def check_permission(member: AllowListEntry, message: object) -> Refusal | None:
    """Return the refusal of a message that this member may not send; None if it may."""
    kind = type(message)
    if kind in PERMISSIONS[member.role]:
        return None
    roles = sorted(role for role, kinds in PERMISSIONS.items() if kind in kinds)
    if not roles:
        return Refusal(
            "malformed",
            f"message must be a request to the broker, got {kind.__name__}; use the same release "
            "of Nyala on all machines",
        )
    return Refusal(
        "role",
        f"{kind.__name__} must come from {' or '.join(roles)}, got the {member.role} "
        f"{member.name}; use a key of that role",
    )


def refuse_run(run: str, got: str) -> Refusal:
    """Return the refusal of a message of another run than the broker's."""
    return Refusal(
        "run",
        f"run must be {run!r}, which this broker serves, got {quoted(got)}; correct run.name or "
        "broker.endpoint",
    )


def refuse_misplaced(run: RunSettings, got: str, message: object) -> Refusal | None:
    """Return the refusal of a message for another run, or for agents that this run does not have.

    Args:
        run: Settings of the broker's run.
        got: Name of the run that the message is for.
        message: The message.
    """
    if got != run.name:
        return refuse_run(run.name, got)
    if isinstance(message, CONVERSATION_REQUESTS) and not run.has_agents:
        return Refusal(
            "mismatch",
            f"run.environment must be agent for conversations of live agents, got "
            f"{run.environment}; take part in a run that has them",
        )
    return None


def refuse_without_store(error: StoreError) -> Refusal:
    """Return the refusal of a request that the store could not carry out; clients send it again."""
    return Refusal("store", f"the store failed, and the request is to be sent again: {error}")


# --------------------------------------------------------------------------------------------------
# Validation of messages: ranges, and records that match their claims and are possible in this run.


BYTES_STEP = "shorten it, or raise buffer.max_episode_bytes"


class Versions(NamedTuple):
    """The versions and fences of the tokens of a request."""

    newest: PolicyVersion | None
    """Newest version of all tokens; None without tokens."""
    oldest: list[int]
    """Number of the oldest version of each part, in order."""
    fences: Sequence[tuple[int, int]] = ()
    """First and last fence of each beat's tokens."""


def check_hello(hello: Hello, *, incarnation: str, teachers: Set[str] = frozenset({""})) -> None:
    """Refuse a HELLO in the name of another incarnation, or with impossible fields.

    Args:
        hello: The message.
        incarnation: Its sender.
        teachers: Names of the teachers of the run's environments; empty = an environment has none.

    Raises:
        RecordError: A name is not the sender's or not printable, the capacity is out of range, or
            the run has no such teacher.
    """
    if hello.incarnation != incarnation:
        raise RecordError(
            f"incarnation must be {quoted(incarnation)}, as in the message's header, got "
            f"{quoted(hello.incarnation)}; use the same release of Nyala on all machines"
        )
    _check_name("incarnation", hello.incarnation)
    _check_name("host", hello.host)
    if hello.teacher not in teachers | {""}:
        raise RecordError(
            f"the name of a teacher must be {named(teachers)}, got {quoted(hello.teacher)}; give "
            "one to `nyala actor --teacher`, or set algorithm.teacher and algorithm.teacher_in: "
            "actor before the run begins"
        )
    _check_range(
        "capacity",
        hello.capacity,
        1,
        MAX_LINES,
        "lower actors.max_episodes_in_flight of this actor",
    )


def check_lease(request: LeaseRequest, *, capacity: int) -> None:
    """Refuse a request for no lease, or for more than the capacity that the actor declared.

    Raises:
        RecordError: The number is out of range.
    """
    _check_range("n", request.n, 1, capacity, "ask for at most the capacity of this actor's HELLO")


def check_beats(request: BeatRequest, *, max_bytes: int, limits: EpisodeLimits) -> Versions:
    """Refuse chunks that are malformed, of another length than they claim, or impossible here.

    Args:
        request: The heartbeat; beats without a chunk only renew a lease, and are not checked.
        max_bytes: Most bytes of a chunk.
        limits: Limits of this run.

    Returns:
        The versions and fences of the tokens of each beat.

    Raises:
        RecordError: A chunk is refused; none of the others counts then.
    """
    full = [beat for beat in request.beats if beat.chunk or beat.num_tokens]
    chunks = [beat.chunk for beat in full]
    summaries = summaries_of_chunks(chunks, max_bytes=max_bytes, limits=limits)
    for beat, summary in zip(full, summaries, strict=True):
        if summary.length != beat.num_tokens:
            raise RecordError(
                f"the chunk of task {beat.task_id} must have {beat.num_tokens} tokens, as its beat "
                f"says, got {summary.length}; use the same release of Nyala on all machines"
            )
        limits.check_log(beat.offset + beat.num_tokens)
        _check_fence(beat.task_id, summary, beat.fence)
    remaining = iter(summaries)
    parts = [next(remaining) if b.chunk or b.num_tokens else None for b in request.beats]
    oldest = [0 if part is None else version_number(part.oldest) for part in parts]
    fences = [
        (0, 0) if part is None else (max(0, part.first_fence), max(0, part.fence)) for part in parts
    ]
    return Versions(_newest(summaries), oldest, fences)


def check_submissions(
    request: SubmitRequest,
    *,
    max_bytes: int,
    limits: EpisodeLimits,
    teachers: Set[str] = frozenset({""}),
    is_teacher: bool = False,
) -> Versions:
    """Refuse records that are malformed, of another task, or impossible in this run.

    Args:
        request: The finished episodes.
        max_bytes: Most bytes of a record.
        limits: Limits of this run.
        teachers: Names of the teachers of the run's environments; empty = an environment has none.
        is_teacher: Its sender is a teacher.

    Returns:
        The versions of the tokens of each record.

    Raises:
        RecordError: A record is refused; none of the others counts then.
    """
    records = [submission.record for submission in request.submissions]
    summaries = summaries_of_records(records, max_bytes=max_bytes, limits=limits)
    for submission, summary in zip(request.submissions, summaries, strict=True):
        if summary.task_id != submission.task_id:
            raise RecordError(
                f"the record must be of task {submission.task_id}, got task {summary.task_id}; use "
                "the same release of Nyala on all machines"
            )
        _check_fence(submission.task_id, summary, submission.fence)
        _check_score(submission, summary, teachers, is_teacher=is_teacher)
    return Versions(_newest(summaries), [version_number(summary.oldest) for summary in summaries])


def _check_score(
    submission: Submission, summary: Summary, teachers: Set[str], *, is_teacher: bool
) -> None:
    """Refuse a record that would be trained without its score, or wait for a teacher in vain."""
    is_trained = submission.task_id < EVAL_BASE
    wanted = teachers if is_trained and not is_teacher else {""}
    if submission.teacher not in wanted:
        raise RecordError(
            f"the teacher of task {submission.task_id} must be {named(wanted)}, got "
            f"{quoted(submission.teacher)}; start this actor with the config.yaml of the run"
        )
    if is_trained and any(teachers) and summary.is_scored != is_teacher:
        raise RecordError(
            f"teacher_logprobs of task {submission.task_id} must come from a teacher and from "
            f"nobody else, got {'some' if summary.is_scored else 'none'} from "
            f"{'a teacher' if is_teacher else 'an actor'}; use the same release of Nyala on all "
            "machines"
        )


def named(teachers: Set[str]) -> str:
    """Write the names of teachers for a refusal."""
    return " or ".join(name or "empty" for name in sorted(teachers))


def check_calls(request: CallRequest, *, max_bytes: int) -> None:
    """Refuse calls without a number, of a later parent, or too long to be delivered."""
    for call in request.calls:
        _check_range("number of a call", call.number, 1, MAX_CALLS, "end the conversation")
        _check_range(
            "parent of a call", call.parent, 0, call.number - 1, "send the call without a parent"
        )
        _check_range("bytes of a call", len(call.tail), 0, max_bytes, BYTES_STEP)


def check_says(request: SayRequest, *, max_bytes: int) -> None:
    """Refuse replies that are too long to be delivered, and answers without a turn.

    Raises:
        RecordError: A reply is refused; none of the others counts then.
    """
    for say in request.says:
        _check_range("bytes of a reply", len(say.reply), 0, max_bytes, BYTES_STEP)
        if not say.turn_end and isinstance(decode_reply(say.reply), AgentAnswer):
            raise RecordError(
                f"turn_end of an answer must be at least 1, got 0 for call {say.number} of task "
                f"{say.beat.task_id}: only an error has no turn; use the same release of Nyala on "
                "all machines"
            )


def check_ends(request: EndRequest, rewards: Sequence[bytes]) -> None:
    """Refuse rewards whose named parts are too long.

    Raises:
        RecordError: A reward is refused; none of the others counts then.
    """
    for end, reward in zip(request.ends, rewards, strict=True):
        _check_range(
            f"bytes of a reward of task {end.task_id}",
            len(reward),
            0,
            MAX_REWARD,
            "shorten the names of its parts",
        )


def check_host(incarnation: str) -> None:
    """Refuse a host whose name is none."""
    _check_name("incarnation", incarnation)


def _check_fence(task_id: int, summary: Summary, fence: int) -> None:
    """Refuse tokens of a later lease than this one, which its next holder could not continue."""
    if summary.fence > fence:
        raise RecordError(
            f"tokens of task {task_id} must be of fences up to {fence}, the fence of its lease, "
            f"got {summary.fence}; use the same release of Nyala on all machines"
        )


def _newest(summaries: list[Summary]) -> PolicyVersion | None:
    return PolicyVersion(*max([summary.newest for summary in summaries])) if summaries else None


def _check_name(field: str, value: str) -> None:
    """Refuse a name that is empty or long, or that a terminal would take for a command."""
    if not 0 < len(value) <= MAX_INCARNATION_CHARS or not value.isprintable():
        raise RecordError(
            f"{field} must have 1 to {MAX_INCARNATION_CHARS} printable characters, got "
            f"{quoted(value)} of {len(value)}; give this actor another --name, or its machine "
            "another host name"
        )


def _check_range(name: str, value: int, low: int, high: int, remedy: str) -> None:
    if not low <= value <= high:
        raise RecordError(f"{name} must be between {low} and {high}, got {value}; {remedy}")
