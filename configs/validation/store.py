"""Bytes that a run needs in Redis and in messages, and rules of replay.

The sums are also used by brokers, the learner and the checks before a start.
"""

from __future__ import annotations

from configs.tables.all_tables import AllTables
from configs.tables.buffer import LARGEST_EPISODE_BYTES, BufferSettings
from configs.tables.run import RunSettings

COMMIT_AT_MEMORY = 0.6  # of maxmemory: from there on the learner commits what it has trained
KEEP_AT_MEMORY = 0.5  # of maxmemory: from there on groups kept for reuse make way

BYTES_OF_A_RECORD = 2048  # besides its tokens: identity, spans, metrics, a short text
BYTES_PER_PROMPT_TOKEN = 4  # its id
BYTES_PER_COMPLETION_TOKEN = 9  # id, log-prob, mask
BYTES_PER_SCORED_TOKEN = 4  # a teacher's log-prob
BYTES_BESIDE_TOKENS = 64 * 1024
"""Most bytes of a record besides its tokens: parts of the reward and metrics, 64 each with names of
100 characters, and hundreds of versions and holders."""
RECORD_MARGIN = 64 * 1024
"""Bytes of a message beside its records: the header, and the ids and fences of a submission."""
MIB = 2**20


def store_disagreements(settings: AllTables) -> list[str]:
    """List settings that exceed Redis' memory or never take effect, each with what to change."""
    checks = (
        _check_max_episode_bytes,
        _check_max_message_bytes,
        _check_replay_capacity,
        _check_replay_lag,
        _check_replay_priority,
        _check_maxmemory,
        _check_max_run_bytes,
    )
    return [text for check in checks if (text := check(settings)) is not None]


def _check_max_episode_bytes(settings: AllTables) -> str | None:
    """Require room for the longest episode, which would otherwise be sampled and lost each time."""
    run, bound = settings.run, settings.buffer.max_episode_bytes
    beside = BYTES_BESIDE_TOKENS + BYTES_PER_PROMPT_TOKEN * run.max_prompt_tokens
    per_token = BYTES_PER_COMPLETION_TOKEN
    if settings.algorithm.teacher_processes:
        per_token += BYTES_PER_SCORED_TOKEN
    least = beside + per_token * run.max_completion_tokens
    if least <= bound:
        return None
    advice = f"raise it to {least}"
    if least > LARGEST_EPISODE_BYTES:
        fits = (LARGEST_EPISODE_BYTES - beside) // per_token
        advice = "lower run.max_prompt_tokens"
        if fits > 0:
            advice = f"lower run.max_completion_tokens to {fits}, with {LARGEST_EPISODE_BYTES} here"
    return (
        f"buffer.max_episode_bytes must be >= {least} for run.max_prompt_tokens = "
        f"{run.max_prompt_tokens} and run.max_completion_tokens = {run.max_completion_tokens}, got "
        f"{bound}, which the longest episode would exceed once it is sampled; {advice}"
    )


def _check_max_message_bytes(settings: AllTables) -> str | None:
    """Require messages that hold an episode; a longer message cuts its actor's connection."""
    least = settings.buffer.max_episode_bytes + RECORD_MARGIN
    if settings.broker.max_message_bytes >= least:
        return None
    return (
        f"broker.max_message_bytes must be >= buffer.max_episode_bytes + {RECORD_MARGIN} = "
        f"{least}, got {settings.broker.max_message_bytes}; "
        "the largest episode would cut its actor's connection: raise it, or lower "
        "buffer.max_episode_bytes"
    )


def max_units_in_flight(run: RunSettings, buffer: BufferSettings) -> int:
    """Return how many groups admission allows between their first lease and their training."""
    return int((run.max_policy_lag + 1) * run.groups_per_batch * buffer.margin)


def memory_shortage(run: RunSettings, buffer: BufferSettings, limit_bytes: int) -> str | None:
    """Return the error of a `maxmemory` under which actors may stop for ever, with its arithmetic.

    None if it is large enough, or 0, which is no limit.

    While a batch fills, Redis holds the episodes that admission allows and what is trained and not
    committed. If both reach `buffer.pause_at_memory` first, the batch never fills.
    """
    under_way, text = _under_way(run, buffer)
    uncommitted = min(buffer.max_uncommitted_bytes, COMMIT_AT_MEMORY * limit_bytes)
    room = buffer.pause_at_memory * limit_bytes
    if not limit_bytes or under_way + uncommitted <= room:
        return None
    return (
        f"Redis' maxmemory must hold {text} + "
        f"{uncommitted / MIB:.0f} MiB trained and not committed within buffer.pause_at_memory = "
        f"{buffer.pause_at_memory} of it, got {limit_bytes / MIB:.0f} MiB; raise it "
        "(buffer.maxmemory_mb where `nyala up` starts the server), or lower run.max_policy_lag or "
        "run.groups_per_batch"
    )


def _under_way(run: RunSettings, buffer: BufferSettings) -> tuple[int, str]:
    """Return the bytes of the episodes that admission allows, and their arithmetic."""
    units = max_units_in_flight(run, buffer)
    record = min(
        buffer.inline_bytes if buffer.object_store else buffer.max_episode_bytes,
        BYTES_OF_A_RECORD
        + BYTES_PER_PROMPT_TOKEN * run.max_prompt_tokens
        + BYTES_PER_COMPLETION_TOKEN * run.max_completion_tokens,
    )
    total = units * run.group_size * record
    return total, (
        f"{units} groups x {run.group_size} episodes x {record / 1024:.0f} KiB = "
        f"{total / MIB:.0f} MiB under way"
    )


def max_uncommitted_bytes(buffer: BufferSettings) -> int:
    """Return how much the learner has trained, at most, before it commits ahead of time."""
    if buffer.max_run_bytes is None:
        return buffer.max_uncommitted_bytes
    return min(buffer.max_uncommitted_bytes, int(COMMIT_AT_MEMORY * buffer.max_run_bytes))


def max_partial_bytes(run: RunSettings, buffer: BufferSettings) -> int:
    """Return the most bytes of an unfinished completion in Redis, over all its chunks.

    Twice what the longest takes in one chunk: each chunk has a header, and versions and actors of
    its tokens; so one that was sent in many small chunks is asked for again, as a whole, before
    its headers outweigh its tokens.
    """
    longest = BYTES_OF_A_RECORD + BYTES_PER_COMPLETION_TOKEN * run.max_completion_tokens
    return min(buffer.max_episode_bytes, 2 * longest)


def _check_maxmemory(settings: AllTables) -> str | None:
    buffer = settings.buffer
    if buffer.url is not None:
        return None  # the learner asks that server when it starts
    return memory_shortage(settings.run, buffer, buffer.maxmemory_mb * MIB)


def _check_max_run_bytes(settings: AllTables) -> str | None:
    buffer, quota = settings.buffer, settings.buffer.max_run_bytes
    if quota is None:
        return None
    under_way, text = _under_way(settings.run, buffer)
    uncommitted = max_uncommitted_bytes(buffer)
    kept = settings.replay.max_bytes if settings.replay.capacity else 0
    if under_way + uncommitted + kept <= quota:
        return None
    return (
        f"buffer.max_run_bytes must hold {text} + {uncommitted / MIB:.1f} MiB trained and not "
        f"committed + {kept / MIB:.1f} MiB kept for replay, got {quota / MIB:.1f} MiB, under which "
        f"a batch may never fill; raise it, or lower what the sum is made of: "
        f"run.max_policy_lag, buffer.max_uncommitted_bytes or replay.max_bytes"
    )


def _check_replay_capacity(settings: AllTables) -> str | None:
    capacity, size = settings.replay.capacity, settings.run.group_size
    if not 0 < capacity < size:
        return None
    return (
        f"replay.capacity must be 0 or >= run.group_size = {size}, got {capacity}; "
        f"groups are kept whole: raise it, or set it to 0"
    )


def _check_replay_lag(settings: AllTables) -> str | None:
    max_lag, every = settings.replay.max_lag, settings.learner.checkpoint_every
    if not settings.replay.capacity or max_lag >= every:
        return None
    return (
        f"replay.max_lag must be >= learner.checkpoint_every = {every}, got {max_lag}; "
        f"a group is kept from the checkpoint after its batch, when it would be too old: raise it"
    )


def _check_replay_priority(settings: AllTables) -> str | None:
    replay = settings.replay
    if settings.run.group_size > 1 or not replay.capacity or replay.sampling != "prioritised":
        return None
    if replay.priority != "advantage":
        return None
    return (
        "replay.priority must be lag where run.group_size is 1, got advantage; "
        "the rewards of a group of one never differ: set it to lag"
    )
