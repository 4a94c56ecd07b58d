"""Operations of actors as the store must carry them out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from buffer.operations.keys import EVAL_BASE
from buffer.operations.values import BeatLine, BeatVerdict, LeaseAnswer, LeasedTask, SubmitLine
from tests.buffer.support.model.state import Model, Task, holder_of

HOLDER_MS = 3_600_000


def lease(
    model: Model,
    incarnation: str,
    *,
    ttl_ms: int,
    n: int,
    version: tuple[int, int],
    key: str,
    seq: int,
    abandoned: Sequence[int],
    begun_only: bool,
    teacher: str,
) -> LeaseAnswer:
    """Evaluations first, then tasks of started units, then new units as far as there is room.

    With `begun_only` those alone that were given back.

    A request that is repeated under its number is granted the same once more; what was granted to
    one that was given up goes back. One with a lower number than the last is overtaken.

    A teacher gets finished tasks that wait for it, with their records, and nothing else.
    """
    if model.state != "RUNNING":
        return LeaseAnswer("DONE" if model.state == "ENDED" else "WAIT", [])
    if model.paused is not None and (teacher or not _end_pause(model, holder_of(key))):
        return LeaseAnswer("WAIT", [])
    is_overtaken = 0 < seq < model.requests.get((key, incarnation), (0, 0, 0))[0]
    if version[0] > model.lineage or is_overtaken:  # the store was rewound: wait for the learner
        return LeaseAnswer("WAIT", [])
    fence, resumed = _granted_before(
        model, (key, incarnation), seq, abandoned, is_teacher=bool(teacher)
    )
    begun = list[int]()
    if not resumed:
        resumed = _pick_ready(model, n, version, begun_only=begun_only, teacher=teacher)
        room = 0 if begun_only or teacher else n - len(resumed)
        begun = _start_units(model, room, version, is_first=not resumed)
        if not resumed + begun:
            return LeaseAnswer("WAIT" if model.new else "EMPTY", [])
        model.fence = fence = max(model.fence + 1, model.now_us)
        model.lease_ms = ttl_ms
    for i in resumed + begun:
        model.tasks[i].fence, model.tasks[i].deadline_ms = fence, model.now_ms + ttl_ms
    if not teacher:
        _note_weights(model, resumed, begun, version)
    answer = LeaseAnswer("OK", [_grant(model, i, incarnation, key) for i in resumed + begun])
    if seq:
        model.requests[key, incarnation] = (seq, fence, model.now_ms + ttl_ms)
    if key and not teacher:
        model.holders[holder_of(key)] = model.now_ms
        oldest = model.now_ms - HOLDER_MS
        model.holders = {tag: at for tag, at in model.holders.items() if at > oldest}
    return answer


def _note_weights(
    model: Model, resumed: list[int], begun: list[int], version: tuple[int, int]
) -> None:
    """What tasks are leased with, and the oldest version that their tokens may have."""
    for i in resumed:
        model.tasks[i].num_bytes_given = model.tasks[i].num_bytes or 0
        model.tasks[i].length_given = model.tasks[i].length or 0
    for i in resumed + begun:
        task = model.tasks[i]
        task.oldest = version if task.length is None else min(version, task.oldest or (0, 0))


def _granted_before(
    model: Model,
    actor: tuple[str, str],
    seq: int,
    abandoned: Sequence[int],
    *,
    is_teacher: bool,
) -> tuple[int, list[int]]:
    """What the last request was granted and nobody has renewed, if it is this one."""
    number, *grant = model.requests.get(actor, (0, 0, 0))
    held = {i: model.tasks[i] for i in model.leased()}
    held = {i: task for i, task in held.items() if (task.teacher is not None) == is_teacher}
    lost = [i for i, task in held.items() if [task.fence, task.deadline_ms] == grant]
    if number == seq:
        return grant[0], sorted(lost, key=lambda i: (i < EVAL_BASE, str(i)))
    for i in lost if number in abandoned else []:
        return_uncharged(model, i)
    return 0, []


def _pick_ready(
    model: Model, n: int, version: tuple[int, int], *, begun_only: bool, teacher: str
) -> list[int]:
    if teacher:
        ready = model.among_ready(None, teacher)
    else:
        places: list[tuple[int, int] | None]
        places = [round_key for round_key in model.open_rounds() if version >= round_key]
        if policy_lag(model, version) <= model.limits.max_policy_lag:
            places.append(None)
        ready = [i for place in places for i in model.among_ready(place)]
    return [i for i in ready if not begun_only or model.tasks[i].place < 0][:n]


def _end_pause(model: Model, asker: str) -> bool:
    """A pause that is due to one holder alone ends when another comes."""
    if len(model.holders) != 1 or asker in {"", *model.holders}:
        return False
    model.paused, model.deaths = None, {}
    return True


def _start_units(model: Model, room: int, version: tuple[int, int], *, is_first: bool) -> list[int]:
    """A unit is split between two actors only when one cannot hold it alone."""
    limits, picked = model.limits, list[int]()
    batches = limits.max_policy_lag + 1 - policy_lag(model, version)
    cap = batches * limits.units_per_batch * limits.margin
    for unit in sorted(model.new, key=lambda unit: (unit, str(unit))):
        splits = 0 < room < limits.group_size
        if units_in_flight(model) >= cap or room < 1 or (splits and not is_first):
            break
        members, specs = model.members(unit), model.new.pop(unit)
        model.open[unit] = set(members)
        for i, spec in zip(members, specs, strict=True):
            model.tasks[i] = Task(spec, place=i)
        picked += members[:room]
        room -= len(members[:room])
        is_first = False
    return picked


def policy_lag(model: Model, version: tuple[int, int]) -> int:
    """Batches by which weights are behind, those of abandoned branches included."""
    lineage, step = version
    fork = min([step, *(model.forks.get(x, 0) for x in range(lineage + 1, model.lineage + 1))])
    return max(0, model.version - fork) + (step - fork)


def units_in_flight(model: Model) -> int:
    """Begun, and not yet trained."""
    claimed = sum(len(claim.units) for k, claim in model.claims.items() if k > model.version)
    return len(model.open) + len(model.buffer) + claimed


def _grant(model: Model, i: int, incarnation: str, key: str) -> LeasedTask:
    task = model.tasks[i]
    task.key = key
    task.state, task.holder = "L", incarnation
    task.progress_ms = model.now_ms
    assert task.spec is not None
    assert task.fence is not None
    if task.teacher is not None:
        assert task.record is not None
        return LeasedTask(i, task.fence, task.spec, 0, (task.record,))
    return LeasedTask(i, task.fence, task.spec, task.length or 0, tuple(task.chunks))


def beat(
    model: Model,
    *,
    ttl_ms: int,
    lines: Sequence[BeatLine],
    progress_timeout_ms: int,
    max_attempts: int,
    max_bytes: int,
    longest_ms: int,
) -> list[BeatVerdict]:
    """Renew leases, append what fits; one that stands still, lasts or grows too much is TAKEN."""
    limits = BeatLimits(ttl_ms, progress_timeout_ms, max_attempts, max_bytes, longest_ms)
    return [BeatVerdict(*renew(model, line, limits)) for line in lines]


class BeatLimits(NamedTuple):
    """What the heartbeats of a call are judged by."""

    ttl_ms: int
    progress_timeout_ms: int
    max_attempts: int
    max_bytes: int
    longest_ms: int


def renew(model: Model, line: BeatLine, limits: BeatLimits) -> tuple[str, int]:
    """One line of a heartbeat: verdict and length."""
    ttl_ms, progress_timeout_ms, max_attempts, max_bytes, longest_ms = limits
    verdict, task = model.judge(*line[:2], line.key), model.tasks.get(line.task_id)
    if verdict != "OK" or task is None:
        return verdict, 0
    length = task.length or 0
    replaces = _replaces(task, line)
    brings = line.num_tokens > 0 and task.teacher is None
    grows = brings and (line.offset == length or replaces)
    num_bytes = len(line.chunk) + (0 if replaces else task.num_bytes or 0)
    turn_ms = model.turn_began_ms(line.task_id)
    idle_since_ms = max(task.progress_ms or 0, turn_ms)
    stood_still = not grows and _is_over(model, idle_since_ms, progress_timeout_ms)
    lasted = _is_over(model, max(line.fence / 1000, turn_ms), longest_ms)
    why = "no progress" if stood_still else "too slow" if lasted else None
    is_late = line.first_fence < (task.last_fence or 0)
    why = "tokens out of order" if grows and length and not replaces and is_late else why
    most = _most_bytes(task, line, max_bytes)
    is_impossible = _is_impossible(task, line, max_bytes)
    why = "too many bytes" if grows and num_bytes > most and is_impossible else why
    talk = model.conversations.get(line.task_id)
    if grows and _is_too_old(task, line.oldest):
        return_uncharged(model, line.task_id)
        return "TAKEN", length
    if why is not None:
        verdict = "TAKEN" if task.state == "L" else "STALE"
        model.take_away(line.task_id, max_attempts, why)
        return verdict, length
    if talk is not None and talk.replies and _begins_anew(task, line):
        why = "begun again after its agent was answered"
        model.lose_conversation(line.task_id, max_attempts, why, line.key)
        return "TAKEN", length
    task.state, task.deadline_ms = "L", model.now_ms + ttl_ms
    if grows and num_bytes <= most and (talk is None or talk.calls):
        return "OK", _append(model, task, line, num_bytes, replaces=replaces)
    if grows:
        return "GAP", 0  # all tokens in one chunk are smaller than in many
    is_gap = line.num_tokens > 0 and line.offset + line.num_tokens > length
    return "GAP" if is_gap else "OK", length


def _begins_anew(task: Task, line: BeatLine) -> bool:
    """Tokens of an episode that its holder has begun again take the place of all others."""
    is_whole = line.offset == 0 < (task.length or 0) and line.num_tokens > 0
    return is_whole and line.first_fence == line.fence > (task.last_fence or 0)


def _replaces(task: Task, line: BeatLine) -> bool:
    """So do all tokens at once."""
    return _begins_anew(task, line) or line.offset == 0 < (task.length or 0) < line.num_tokens


def _most_bytes(task: Task, line: BeatLine, max_bytes: int) -> int:
    """What came with a lease is not its holder's doing, who may add twice what its tokens take."""
    if _begins_anew(task, line):
        return max_bytes
    own = line.offset + line.num_tokens - (task.length_given or 0)
    return max(max_bytes, min(2 * max_bytes, (task.num_bytes_given or 0) + 18 * own))


def _is_impossible(task: Task, line: BeatLine, max_bytes: int) -> bool:
    """Whether no holder of a possible episode adds as much, which is half of the limit."""
    if line.offset > 0:
        return len(line.chunk) > max_bytes
    added = len(line.chunk) - (task.num_bytes_given or 0)
    return _begins_anew(task, line) or added > max_bytes / 2


def _is_too_old(task: Task, oldest: int) -> bool:
    """Whether tokens are of weights that no holder can have had."""
    lineage, step = task.oldest or (0, 0)
    return divmod(oldest, 2**32) < (lineage, step)


def _is_over(model: Model, since_ms: float, limit_ms: int) -> bool:
    """Judged only beside a broker that reaps: else nothing could arrive, or the clock jumped."""
    gap_ms = model.now_ms - (model.now_ms if model.reaped_ms is None else model.reaped_ms)
    if gap_ms < 0 or gap_ms > (model.lease_ms or 0) / 2:
        return False
    return limit_ms > 0 and model.now_ms - max(since_ms, model.grace_until_ms or 0) > limit_ms


def _append(model: Model, task: Task, line: BeatLine, num_bytes: int, *, replaces: bool) -> int:
    if _begins_anew(task, line):
        task.num_bytes_given = task.length_given = 0
    task.length, task.progress_ms = line.offset + line.num_tokens, model.now_ms
    task.num_bytes, task.last_fence = num_bytes, line.last_fence
    task.chunks = [line.chunk] if replaces else [*task.chunks, line.chunk]
    if len(task.chunks) >= model.limits.max_chunks:
        task.chunks = [b"".join(task.chunks)]
    return task.length


def cut(model: Model, rows: Sequence[tuple[int, int]], key: str, *, max_attempts: int) -> list[str]:
    """What could not be delivered begins anew; a task that is too large without it is charged."""
    verdicts = []
    for i, fence in rows:
        verdicts.append(model.judge(i, fence, key))
        if verdicts[-1] == "OK" and model.tasks[i].length:
            model.cut(i)
            return_uncharged(model, i)
        elif verdicts[-1] == "OK":
            model.take_away(i, max_attempts, "too large to deliver")
    return verdicts


def shrink(model: Model, num_bytes: int) -> tuple[int, int]:
    """The largest chunks of ready tasks go until so much is free."""
    talks = model.conversations
    mailboxes = {i: talk.num_bytes for i, talk in talks.items()}
    ready = model.among_ready(None)
    sizes = {i: (model.tasks[i].num_bytes or 0) + mailboxes.get(i, 0) for i in ready}
    freed = count = 0
    for i in sorted(sizes, key=lambda i: (-sizes[i], str(i))):
        if freed >= num_bytes or not sizes[i]:
            break
        model.cut(i)
        freed, count = freed + sizes[i], count + 1
    return count, freed


def submit(model: Model, lines: Sequence[SubmitLine]) -> list[str]:
    """Finished episodes; a unit without unfinished members enters the buffer.

    One that names a teacher begins anew as a task of it, and has its record already.
    """
    verdicts, done = [], dict[int, set[int]]()
    for i, fence, record, key, oldest, teacher in lines:
        verdict = model.judge(i, fence, key)
        if verdict == "OK" and teacher and model.tasks[i].teacher is not None:
            verdict = "STALE"
        if verdict == "OK" and _is_too_old(model.tasks[i], oldest):
            verdict = "TAKEN"
            return_uncharged(model, i)
        elif verdict == "OK" and teacher and i < EVAL_BASE:
            _await_score(model, i, teacher, record, (fence, key))
        elif verdict == "OK":
            task = model.tasks[i]
            task.state, task.chunks, task.teacher = "D", [], None
            model.conversations.pop(i, None)
            if task.round is not None:
                model.rounds[task.round].results[i] = record
                model.rounds[task.round].unfinished.discard(i)
            else:
                task.record = record
                done.setdefault(model.unit_of(i), set()).add(i)
        verdicts.append(verdict)
    for unit, ids in done.items():
        model.finish_members(unit, ids)
    return verdicts


def _await_score(model: Model, i: int, teacher: str, record: bytes, made: tuple[int, str]) -> None:
    model.cut(i)
    task = model.tasks[i]
    task.state, task.place, task.record = "R", i, record
    task.teacher, task.made, task.fence = teacher, made, None
    task.attempts, task.failures, task.losses = None, None, None
    task.lost_by, task.failed_by, task.losses_by = [], [], []
    model.teachers.add(teacher)


def release(model: Model, rows: Sequence[tuple[int, int]], key: str) -> list[str]:
    """Leases come back for good, and nothing is charged."""
    verdicts = []
    for i, fence in rows:
        verdicts.append(model.judge(i, fence, key))
        if verdicts[-1] == "OK":
            return_uncharged(model, i)
    return verdicts


def fail(
    model: Model,
    key: str,
    *,
    max_attempts: int,
    max_data_failures: int,
    failures: Sequence[tuple[int, int, str, str]],
) -> list[str]:
    """Data failures have a budget of their own."""
    verdicts = []
    for i, fence, kind, why in failures:
        verdicts.append(model.judge(i, fence, key))
        if verdicts[-1] != "OK":
            continue
        model.tasks[i].fence = None
        if model.tasks[i].state != "L":
            verdicts[-1] = "DUP"
            continue
        talk = model.conversations.get(i)
        has_ended = talk is not None and talk.why is not None
        if kind != "data" and has_ended:
            model.lose_conversation(i, max_attempts, why, key)
        elif kind != "data":
            model.charge(i, max_attempts, why)
        else:
            if has_ended:
                model.cut(i)
            model.charge_data(i, max_data_failures, why)
    return verdicts


def reap(model: Model, *, max_attempts: int, batch: int, every_ms: int) -> list[int]:
    """Expired leases come back; none in the grace after a recovery, a gap or a jump."""
    now, ttl_ms = model.now_ms, model.lease_ms or 0
    gap_ms = now - (now if model.reaped_ms is None else model.reaped_ms)
    model.reaped_ms = now
    if gap_ms < 0 or gap_ms > max(ttl_ms / 2, 3 * every_ms):
        model.grace_until_ms = now + ttl_ms
        for i in model.leased():
            model.tasks[i].deadline_ms = min(model.tasks[i].deadline_ms, model.grace_until_ms)
        for talk in model.conversations.values():
            talk.deadline_ms = min(talk.deadline_ms, model.grace_until_ms)
    if model.state == "RECOVERING" or now < (model.grace_until_ms or 0):
        return []
    reaped: list[int] = []
    for is_eval, is_scoring in ((False, False), (False, True), (True, False)):
        leases = [i for i in model.leased() if (i >= EVAL_BASE) == is_eval]
        leases = [i for i in leases if (model.tasks[i].teacher is not None) == is_scoring]
        expired = [i for i in leases if model.tasks[i].deadline_ms <= now][:batch]
        reaped += _take_back(model, expired, max_attempts, "lease expired")
    _expire_tickets(model, max_attempts, batch)
    return reaped


def _expire_tickets(model: Model, max_attempts: int, batch: int) -> None:
    talks = model.conversations
    held = [i for i, talk in talks.items() if talk.ticket is not None and talk.why is None]
    expired = [i for i in held if talks[i].deadline_ms <= model.now_ms]
    expired.sort(key=lambda i: (talks[i].deadline_ms, str(i)))
    for i in expired[:batch]:
        talk = talks.get(i)
        if talk is not None and talk.calls:
            model.lose_conversation(i, max_attempts, "its host died", talk.key)
        elif talk is not None:
            model.note_silence(i)
            talk.ticket, talk.wanted_ms = None, model.now_ms
            model.note_news(i)


def release_dead_actor(model: Model, incarnation: str, key: str, *, max_attempts: int) -> list[int]:
    """All of a dead actor's leases come back, and no message of it revives one."""
    if model.state != "RUNNING":
        return []
    dead = (incarnation, key)
    held = [i for i in model.leased() if (model.tasks[i].holder, model.tasks[i].key) == dead]
    return _take_back(model, held, max_attempts, "its actor died", is_final=True)


def _take_back(
    model: Model, ids: list[int], max_attempts: int, why: str, *, is_final: bool = False
) -> list[int]:
    """A member that dies may end its unit, and with it the leases of the others."""
    taken = []
    for i in ids:
        task = model.tasks.get(i)
        if task is None or task.state != "L":
            continue
        if is_final:
            task.fence = None
        model.charge(i, max_attempts, why)
        taken.append(i)
    return taken


def suspend(model: Model, key: str, reason: str, *, is_brief: bool) -> list[int]:
    """A key gets no leases, each time for twice as long; what it holds goes to others."""
    model.suspended = {
        tag: found for tag, found in model.suspended.items() if model.now_ms <= found[0] + HOLDER_MS
    }
    ends_ms, times, _ = model.suspended.get(key, (0, 0, ""))
    lasts_ms = 10_000 if is_brief else min(60_000 * 2**times, 3_600_000)
    ends_ms = max(ends_ms, model.now_ms + lasts_ms)
    model.suspended[key] = (ends_ms, times + (not is_brief), reason)
    tags = {i: model.tasks[i].key or "" for i in model.leased()}
    held = [i for i, tag in tags.items() if key in (tag, holder_of(tag))]
    for i in held:
        return_uncharged(model, i)
    return held


def share(
    model: Model, key: str, lineage: int, n: int, *, still_ms: int, token_ms: float
) -> list[int]:
    """The largest holder, or key of one's own, gives still leases back down to an even share."""
    if model.state != "RUNNING" or model.paused is not None or lineage > model.lineage:
        return []
    training = [i for i in model.leased() if i < EVAL_BASE and model.tasks[i].teacher is None]
    tags = {i: model.tasks[i].key or "" for i in training}
    if key in tags.values():
        return []
    owners = {i: holder_of(tag) for i, tag in tags.items()}
    owner, fair = holder_of(key), _even_share(owners, holder_of(key))
    if sum(other == owner for other in owners.values()) >= fair:
        owners = {i: tag for i, tag in tags.items() if holder_of(tag) == owner}
        owner, fair = key, _even_share(owners, key)
    held = Counter(owners.values())
    hog = min(held, key=lambda tag: (-held[tag], tag), default="")
    largest = [i for i, other in owners.items() if other == hog]
    largest.sort(key=lambda i: (-(model.tasks[i].fence or 0), -i))
    may_go = [
        i
        for i in largest
        if model.turn_began_ms(i) < model.now_ms
        and (
            _is_still(model, i, still_ms, token_ms)
            or (len(largest) >= 2 * fair and _num_made(model.tasks[i]) == 0)
        )
    ]
    given = may_go[: max(0, min(len(largest) - fair, fair - held[owner], n))]
    for i in given:
        return_uncharged(model, i)
    return given


def _num_made(task: Task) -> int:
    """Tokens since it was leased."""
    return (task.length or 0) - (task.length_given or 0)


def _is_still(model: Model, i: int, still_ms: int, token_ms: float) -> bool:
    """Without a token for so long, or for as long with fewer than one in each of its times."""
    task, turn_ms = model.tasks[i], model.turn_began_ms(i)
    age_ms = model.now_ms - max((task.fence or 0) / 1000, turn_ms)
    is_slow = age_ms >= still_ms and _num_made(task) * token_ms < age_ms
    return is_slow or model.now_ms - max(task.progress_ms or model.now_ms, turn_ms) >= still_ms


def _even_share(owners: dict[int, str], asker: str) -> int:
    """Of all leases, by their owners and whoever asks."""
    return -(-len(owners) // len({*owners.values(), asker}))


def return_uncharged(model: Model, i: int) -> None:
    """A lease ends for good; one that was reaped has been charged."""
    model.tasks[i].fence = None
    if model.tasks[i].state == "L":
        model.give_back(i)


def resume(model: Model) -> bool:
    """An operator ends the pause and all suspensions."""
    was_closed = model.paused is not None or bool(model.suspended or model.deaths)
    model.paused, model.suspended, model.deaths = None, {}, {}
    return was_closed
