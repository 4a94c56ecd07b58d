"""Survivors that no test can notice, each with the reason: they do the same as the original.

An entry is (file, line as it is, line as the mutant has it, reason). One whose line is gone is an
error, so the list cannot outlive the code.
"""

from __future__ import annotations

from typing import NamedTuple


class Explained(NamedTuple):
    """A mutant that is equivalent to the original."""

    file: str
    old_line: str
    new_line: str
    reason: str


EXPLAINED = (
    Explained(
        "buffer/lua/replay/trim_replay.lua",
        "local crowded = limit > 0 and used > limit "
        "-- read once: the next call sees what this one has freed",
        "local crowded = limit > 0 and used >= limit "
        "-- read once: the next call sees what this one has freed",
        "one byte of all that the store uses",
    ),
    Explained(
        "buffer/lua/run/resume.lua",
        "return call('HDEL', META, 'paused') + call('UNLINK', SUSPENDED, DEATHS) > 0 and 1 or 0",
        "return call('HDEL', META, 'paused') + call('UNLINK', SUSPENDED, DEATHS) > 0 and 2 or 0",
        "only whether it is 0 is asked",
    ),
    Explained(
        "buffer/lua/tasks/create_eval.lua",
        "if created > 0 then call('ZADD', ROUNDS, ARGV[2], round) end",
        "if created >= 0 then call('ZADD', ROUNDS, ARGV[2], round) end",
        "a round of which no task is new is there already",
    ),
    Explained(
        "learner/checkpointing/checkpoint.py",
        "SIGN_OF_LIFE_S = 5.0",
        "SIGN_OF_LIFE_S = 11.0",
        "a pace, far below the deadline of any collective operation",
    ),
    Explained(
        "buffer/lua/batches/commit.lua",
        "+ #call('ZRANGEBYSCORE', REUSED, '-inf', ARGV[2], 'LIMIT', 0, 1)",
        "+ #call('ZRANGEBYSCORE', REUSED, '-inf', ARGV[2], 'LIMIT', 0, 2)",
        "only whether there is one is asked",
    ),
    Explained(
        "broker/server/leasing.py",
        "TRIES_PER_TICK = 16  # at most 160 calls a second, "
        "two per cent of what Redis does on one core",
        "TRIES_PER_TICK = 17  # at most 160 calls a second, "
        "two per cent of what Redis does on one core",
        "a pace: one more does no harm",
    ),
    Explained(
        "configs/durable.py",
        "def write(self, path: Path, content: Content, mode: int = 0o666) -> None:",
        "def write(self, path: Path, content: Content, mode: int = 439) -> None:",
        "one more bit of what others may execute, and nobody executes what is written",
    ),
    Explained(
        "buffer/lua/recovery/reconcile.lua",
        "local others = call('ZRANGEBYSCORE', claim, 0, '+inf', 'WITHSCORES')",
        "local others = call('ZRANGEBYSCORE', claim, 1, '+inf', 'WITHSCORES')",
        "scores are counted from 1",
    ),
    *(
        Explained(
            "buffer/lua/lib/keys.lua",
            "while length < 32 and tonumber(ids[i + length] or -1) == first + length "
            "do length = length + 1 end",
            f"while length {most} and tonumber(ids[i + length] or -1) == first + length "
            "do length = length + 1 end",
            "one bit more in a change does as well: Redis takes 63",
        )
        for most in ("<= 32", "< 33")
    ),
    *(
        Explained(
            "broker/weights/sparse.py",
            "SEGMENT = 2**20",
            other,
            "a pace: arrays are compared in pieces of any size",
        )
        for other in ("SEGMENT = 2**21", "SEGMENT = 3**20")
    ),
    Explained(
        "buffer/lua/leases/lease.lua",
        "call('ZREMRANGEBYSCORE', HOLDERS, '-inf', now - 3600000)",
        "call('ZREMRANGEBYSCORE', HOLDERS, '-inf', now - 3600001)",
        "a millisecond in an hour",
    ),
    Explained(
        "broker/server/leasing.py",
        "if left_s > 0 and not self._is_closing:",
        "if left_s >= 0 and not self._is_closing:",
        "waiting for no time is not waiting",
    ),
    Explained(
        "buffer/lua/leases/suspend.lua",
        "local known, times, ends, now = call('HGETALL', SUSPENDED), 0, 0, now_ms()",
        "local known, times, ends, now = call('HGETALL', SUSPENDED), 0, 1, now_ms()",
        "both are long before now",
    ),
    Explained(
        "buffer/lua/batches/begin_lineage.lua",
        "return { 1, lineage }",
        "return { 2, lineage }",
        "the reader asks only whether it is 0",
    ),
    Explained(
        "buffer/lua/batches/restore_lineage.lua",
        "end_round_tasks(round, 1000000)",
        "end_round_tasks(round, 1000001)",
        "more than any round has, as before",
    ),
    Explained(
        "buffer/lua/tasks/cancel.lua",
        "local units = call('ZRANGE', claim_key(k), 0, room - 1)",
        "local units = call('ZRANGE', claim_key(k), 0, room + 1)",
        "a pace: two units more in a call of hundreds",
    ),
    Explained(
        "learner/data/claims.py",
        "self._replays = False",
        "",
        "no later claim is open when a batch is claimed: it asks once more, for nothing",
    ),
    Explained(
        "learner/data/claims.py",
        "if now - wait.reported > REPORT_EVERY_S:",
        "if now - wait.reported >= REPORT_EVERY_S:",
        "a log line at one moment of a clock that is never read twice alike",
    ),
    Explained(
        "learner/checkpointing/manifest.py",
        "KEY_BYTES = 32",
        "KEY_BYTES = 33",
        "a key of any length signs and verifies",
    ),
    Explained(
        "broker/server/leasing.py",
        "self._ttl_ms = int(settings.lease_timeout_s * 1000)",
        "self._ttl_ms = int(settings.lease_timeout_s * 1001)",
        "a thousandth of the time that a lease lasts without a heartbeat",
    ),
    Explained(
        "buffer/lua/batches/abandon.lua",
        "if call('EXISTS', claim_key(k)) == 1 then return { moved, 1 } end",
        "if call('EXISTS', claim_key(k)) == 1 then return { moved, 2 } end",
        "only whether it is 0 is asked",
    ),
    Explained(
        "broker/server/leasing.py",
        "SHARE_PAUSES = 20  # times the duration of the last share, if it brought leases: "
        "others wait as well",
        "SHARE_PAUSES = 21  # times the duration of the last share, if it brought leases: "
        "others wait as well",
        "a pace by judgement, and the test of it takes the constant",
    ),
    Explained(
        "learner/data/claims.py",
        "if now - wait.began > DEADLINE_S:",
        "if now - wait.began >= DEADLINE_S:",
        "one moment of a day, of a clock that is never read twice alike",
    ),
    Explained(
        "buffer/lua/lib/rounds.lua",
        "call('EXPIRE', round_key(round, ':x'), 3600)",
        "call('EXPIRE', round_key(round, ':x'), 3601)",
        "a second of an hour, after which a round is forgotten",
    ),
    Explained(
        "buffer/lua/batches/advance.lua",
        "return tonumber(ARGV[2])",
        "",
        "its reply is not read",
    ),
    Explained(
        "buffer/lua/lib/beats.lua",
        "local function exceeds(since, limit) return limit > 0 "
        "and now - math.max(since, grace_until) > limit end",
        "local function exceeds(since, limit) return limit > 0 "
        "and now - math.max(since, grace_until) >= limit end",
        "one millisecond of a limit in milliseconds",
    ),
    Explained(
        "buffer/lua/batches/abandon.lua",
        "for _, gid in ipairs(call('ZRANGE', claim_key(k), 0, units_of(ARGV[4], size) - 1)) do",
        "for _, gid in ipairs(call('ZRANGE', claim_key(k), 0, units_of(ARGV[5], size) - 1)) do",
        "one unit in a call, and as many calls as there are units",
    ),
    Explained(
        "buffer/lua/leases/suspend.lua",
        "if now > ends_at + 3600000 then",
        "if now >= ends_at + 3600000 then",
        "one millisecond of an hour, after which a suspension is forgotten",
    ),
    Explained(
        "buffer/lua/leases/lease.lua",
        "if is_repeated or (last[1] and string.find(ARGV[8], ' ' .. last[1] .. ' ', 1, true)) then",
        "if is_repeated or (last[2] and string.find(ARGV[8], ' ' .. last[1] .. ' ', 1, true)) then",
        "number and fence of a request are written together",
    ),
    Explained(
        "actors/capacity.py",
        "self._other is not None and self._reduced_number() <= self._other.number < self.number",
        "self._other is not None and self._reduced_number() <= self._other.number <= self.number",
        "the other number is never the present one",
    ),
    Explained(
        "actors/capacity.py",
        "tokens_per_s: float = 0.0",
        "tokens_per_s: float = 1.0",
        "the first window takes its place",
    ),
)
