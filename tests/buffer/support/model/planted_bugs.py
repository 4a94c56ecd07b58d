"""Bugs planted by hand in `buffer/lua`, one operator, key or line each, over all of its scripts.

They are written before the histories that must find them, without a look at what those check:

    python -m tests.buffer.support.model.hunt --seeds 50

plays random histories alone against each, and prints which seed found it. A text that is no longer
in its file, or is there twice, is an error: the bug has to follow the Lua.
"""

from __future__ import annotations

from typing import NamedTuple


class Bug(NamedTuple):
    """One text of one file of `buffer/lua`, exchanged for another."""

    file: str
    old: str
    new: str


FIRST = (
    Bug("beat", "offset + tokens > length then", "offset + tokens >= length then"),
    Bug("beat", "now - math.max(since, grace", "now - math.min(since, grace"),
    Bug("fail", "charge(id, tonumber(ARGV[2]), reason)", "charge(id, tonumber(ARGV[3]), reason)"),
    Bug("lease", "call('ZRANGE', key, 0, room - 1)", "call('ZRANGE', key, 0, room)"),
    Bug("lease", "(room < size and #picked > 0)", "(room <= size and #picked > 0)"),
    Bug("lease", "call('ZADD', READY, id, id)", "call('ZADD', READY, -1, id)"),
    Bug("reap", "gap > math.max(ttl / 2", "gap > math.min(ttl / 2"),
    Bug("reap", "'-inf', now, 'LIMIT'", "'-inf', '(' .. now, 'LIMIT'"),
    Bug("tasks", "        call('HDEL', task_key(id), 'fence')", ""),
    Bug("tasks", "if state == 'L' then give_back", "if state == 'R' then give_back"),
    Bug("submit", "if length > 0 then call('UNLINK', chunks_key(id)) end", ""),
    Bug("submit", "else call('ZREM', READY, id) end", "end"),
    Bug("actor_seen", "now - ARGV[1] * 1000", "now + ARGV[1] * 1000"),
    Bug("abandon", "tonumber(k) <= tonumber(version)", "tonumber(k) < tonumber(version)"),
    Bug(
        "advance", "tonumber(ARGV[2]) < tonumber(version)", "tonumber(ARGV[2]) <= tonumber(version)"
    ),
    Bug("begin_lineage", "math.min(fork, tonumber(meta[2]))", "math.max(fork, tonumber(meta[2]))"),
    Bug("claim", "math.min(missing, units_of", "math.max(missing, units_of"),
    Bug("commit", "math.max(tonumber(ARGV[2])", "math.min(tonumber(ARGV[2])"),
    Bug("restore_lineage", "'version', step,", "'version', lineage,"),
    Bug("create", "call('ZADD', NEW, gid, gid)", "call('ZADD', NEW, created, gid)"),
    Bug("cancel", "'(' .. call('HGET', META, 'version')", "call('HGET', META, 'version')"),
    Bug(
        "create_eval",
        "call('ZADD', ROUNDS, ARGV[2], round)",
        "call('ZADD', ROUNDS, ARGV[1], round)",
    ),
    Bug("requeue_dead", "'att', 'fails', 'failed_by',", "'fails', 'failed_by',"),
    Bug("purge_dead", "forget({ id }, PURGED)", "leave_bits({ id }, PURGED)"),
    Bug(
        "publish",
        "tonumber(ARGV[2]) < tonumber(known[2])",
        "tonumber(ARGV[2]) > tonumber(known[2])",
    ),
    Bug("recovered", "now_ms() + grace", "now_ms() - grace"),
    Bug("reconcile", "+ i - 6 - total", "+ i - 6 + total"),
    Bug("tasks", "failures < most * (is", "failures <= most * (is"),
    Bug("units", "alive < math.min(", "alive <= math.min("),
    Bug("replay", "used < tonumber(", "used <= tonumber("),
)

SECOND = (
    Bug("beat", "    call('DEL', chunks)\n", ""),
    Bug("tasks", "if state == 'L' then charge(", "if state == 'R' then charge("),
    Bug("fail", "if ARGV[i + 2] == 'data'", "if ARGV[i + 2] ~= 'data'"),
    Bug("lease", "fork = math.min(fork", "fork = math.max(fork"),
    Bug("lease", "'(' .. version, '+inf'", "version, '+inf'"),
    Bug("lease", "actor_step >= step", "actor_step > step"),
    Bug(
        "lease",
        "'fence', fence, 'progress', since, 'inc', ARGV[1], 'key', ARGV[6], 'spec'",
        "'fence', fence, 'inc', ARGV[1], 'key', ARGV[6], 'spec'",
    ),
    Bug("reap", "if gap < 0 or", "if gap < 0 and"),
    Bug("tasks", " and call('ZSCORE', leases, id)", ""),
    Bug("submit", "call('ZREM', EVAL_LEASES, id)", ""),
    Bug("abandon", "give_kept_back(gid, 0)", "give_kept_back(gid, 1)"),
    Bug("advance", "'-inf', ARGV[2]))", "'-inf', '(' .. ARGV[2]))"),
    Bug("begin_lineage", "math.max(tonumber(ARGV[1]) + 1", "math.max(tonumber(ARGV[1])"),
    Bug("claim", "tonumber(k) <= tonumber(meta[2])", "tonumber(k) < tonumber(meta[2])"),
    Bug("commit", "give_kept_back(gid, 1)", "give_kept_back(gid, 0)"),
    Bug("seal", "'keep:' .. ARGV[i], ARGV[i + 1]", "'keep:' .. ARGV[i + 1], ARGV[i]"),
    Bug("cancel", "if call('SCARD', round_key(round, ':u')) == 0 then close_round(round) end", ""),
    Bug("close_eval", "close_round(round)", ""),
    Bug("rounds", "call('EXPIRE', round_key(round), 3600)", ""),
    Bug("dead_letters", "ARGV[1] + ARGV[2] - 1", "ARGV[1] + ARGV[2]"),
    Bug("requeue_dead", "call('ZREM', BUF, gid)", ""),
    Bug("requeue_dead", "specs[i] = specs[i] or known", "specs[i] = known or specs[i]"),
    Bug("restore_committed", "if not spared[id] then", "if spared[id] then"),
    Bug("withdrawal", "return count < #ids and dead", "return count <= #ids and dead"),
    Bug("tasks", "if length > tonumber(task[3]", "if length >= tonumber(task[3]"),
    Bug("reuse", "call('ZREM', AGES, gid)", ""),
    Bug("trim_replay", "<= tonumber(ARGV[2])", "< tonumber(ARGV[2])"),
    Bug("confirm", "call('HSET', META, 'seen', ARGV[1])", ""),
    Bug("reconcile", "if ARGV[4] == '1' then", "if ARGV[4] == '0' then"),
    Bug("publish", "known[2] == ARGV[2] and", "known[2] ~= ARGV[2] and"),
)
"""Written when the histories found those above, before they met any of these."""

LISTS = {"first": FIRST, "second": SECOND}
