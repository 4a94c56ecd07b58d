"""Broken protocols: small edits of the Lua, and the invariant by which a history must notice.

A mutant shows that the checker looks at something, and that the faults reach it. Each replaces one
text in one file of `buffer/lua`; a text that is no longer there, or is there twice, is an error.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from buffer.client.scripts import FILES, LoadScript, Script, load_script, make_script


class Mutant(NamedTuple):
    """One thing that somebody could get wrong."""

    file: str
    old: str
    new: str
    invariant: str
    """Whose name must be in the message; alternatives by `|`, where either may come first."""


_UNSEAL = """
for _, gid in ipairs(sealed ~= '' and call('ZRANGE', claim, 0, -1) or {}) do
  call('ZREM', claim, gid)
  call('ZADD', BUF, call('HINCRBY', META, 'arrivals', 1), gid)
  for _, id in ipairs(members(gid, size)) do call('SMOVE', CLAIMED, DONE, id) end
end
sealed = ''
"""

MUTANTS = {
    "no fence check": Mutant(
        "tasks", "if task[2] ~= fence or (task[3] or key) ~= key then return 'STALE' end", "", "I9"
    ),
    "no dedupe": Mutant("tasks", "if task[1] == 'D' then return 'DUP' end", "", "I1"),
    "no offset check": Mutant("beats", "offset == length or replaces", "true", "I3"),
    "claim not sticky": Mutant(
        "claim", "call('ZADD', CLAIMS, k, k)", _UNSEAL + "call('ZADD', CLAIMS, k, k)", "I6|I7"
    ),
    "reap forgets to remove": Mutant(
        "reap", "reaped[#reaped + 1] = id", "call('ZADD', leases, now, id) reaped[1] = id", "I1"
    ),
    "release forgets to remove": Mutant(
        "tasks",
        "call('ZREM', lease_key(id, teacher), id)\n  call('HSET', task_key(id), 'st', 'R')",
        "call('HSET', task_key(id), 'st', 'R')",
        "I1",
    ),
    "reap of a unit that just broke": Mutant(
        "reap", "if call('ZSCORE', leases, id) then", "do", "I1|I2"
    ),
    "fence is a plain counter": Mutant(
        "keys",
        "math.max(tonumber(number) + 1, time[1] * 1000000 + time[2])",
        "tonumber(number) + 1",
        "I8",
    ),
    "no reconcile": Mutant("reconcile", "for i = 6, #ARGV do", "for i = 6, 5 do", "I5|I7"),
    "reconcile forgets other claims": Mutant(
        "withdrawal", "if call('ZREM', claim_key(k), gid) == 1 then", "if false then", "I1|I2"
    ),
    "reconcile forgets other places": Mutant("withdrawal", "  unlist(id)\n", "", "I1|I2"),
    "what is committed is not restored": Mutant(
        "restore_committed", "for i = 2, #ARGV do", "for i = 2, 1 do", "I5"
    ),
    "no grace after recovery": Mutant(
        "reap", "or now < tonumber(meta[2] or '0') then", "then", "8.6"
    ),
    "leases while recovering": Mutant(
        "lease", "if meta[1] ~= 'RUNNING' then return { 'WAIT' } end", "", "8.6"
    ),
    "claims while recovering": Mutant(
        "claim", "if meta[1] ~= 'RUNNING' then return { 'CLOSED' } end", "", "8.6"
    ),
    "a claim is silent about what came": Mutant(
        "claim", "answer[#answer + 1] = { oldest[i], unpack(finished) }", "", "I15"
    ),
    "a claim is silent when it is full": Mutant(
        "claim", "if knew_all and #oldest / 2 < missing then", "if knew_all then", "I15"
    ),
    "a claim takes everybody for one who knows": Mutant("claim", "if knew_all and", "if", "I15"),
    "recovered under a server that is gone": Mutant(
        "recovered", "if meta[1] ~= ARGV[2] then", "if false then", "8.6"
    ),
    "no learner fence": Mutant(
        "keys", "if tonumber(lineage) < tonumber(current) then", "if false then", "I6"
    ),
    "an old learner's run snapshot is shown": Mutant(
        "write_run_snapshot", "if refused then return refused end", "", "I6"
    ),
    "admission forgets batches in training": Mutant(
        "lease", "units = units + call('ZCARD', claim_key(k))", "", "I14"
    ),
    "admission forgets the actor's lag": Mutant(
        "lease", "= tonumber(meta[6]) + 1 - policy_lag()", "= tonumber(meta[6]) + 1", "I14"
    ),
    "a started unit refused for capacity": Mutant(
        "lease",
        "if room > 0 and batches_left > 0 then pick_ready(READY) end",
        "if room > 0 and units_in_flight() < 9 then pick_ready(READY) end",
        "I15",
    ),
    "commit before training": Mutant(
        "commit", "if tonumber(ARGV[2]) > tonumber(meta[1]) then", "if false then", "I6"
    ),
    "commit before seal": Mutant(
        "commit", "'sealed') == 0 and call('EXISTS', claim_key(k)) == 1", "'sealed') == 2", "I6"
    ),
    "a sealed batch can shrink": Mutant("drop", "'sealed') == 1", "'sealed') == 2", "I7"),
    "a drop forgets the tasks": Mutant("drop", "drop_unit(ARGV[i], size, ARGV[3])", "0", "I2"),
    "a drop leaves the claim as it is": Mutant(
        "drop", "if call('ZREM', claim_key(ARGV[2]), ARGV[i]) == 1 then", "do", "I13"
    ),
    "a drop has no reason": Mutant("units", "call('SADD', REASONS, reason)", "", "I2"),
    "a commit forgets the tasks": Mutant("commit", "forget(trained, COMMITTED)", "", "I2"),
    "create is not idempotent": Mutant(
        "create", "if call('GETBIT', KNOWN, ids[1]) == 0 then", "do", "I1|I2|I3|I8"
    ),
    "a revived lease stays ready": Mutant(
        "beats", "call('ZREM', ready_key(id, teacher), id)", "", "I1|I3"
    ),
    "a use is not counted": Mutant("replay", "'uses', uses)", "'uses', 0)", "R1"),
    "a drawn unit can be drawn again": Mutant("reuse", "call('ZREM', REPLAY, gid)", "", "R1"),
    "a reused unit counts as a new one": Mutant(
        "reuse",
        "call('ZADD', REUSED, k, gid)",
        "call('ZADD', claim_key(k), 0, gid) call('ZADD', REUSED, k, gid)",
        "I2|I7",
    ),
    "a kept unit is not committed": Mutant("commit", "leave_bits(trained, COMMITTED)", "", "I2"),
    "a sealed batch reuses more": Mutant(
        "reuse", "'sealed') == 1 then missing = 0", "'sealed') == 2 then missing = 0", "R2"
    ),
    "a rewound store keeps units whose uses it forgot": Mutant(
        "replay_is_whole", "for k = call('HGET'", "do return 1 end for k = call('HGET'", "R1|R2"
    ),
    "a unit that is forgotten leaves its records": Mutant(
        "replay", "call('UNLINK', record_key(id)) end", "end", "I10"
    ),
    "a reply leaves before its tokens are stored": Mutant(
        "say_replies",
        "elseif verdict == 'OK' then\n      say(",
        "elseif verdict then\n      say(",
        "C1",
    ),
    "a reply is said again": Mutant("say_replies", "return nil, true", "return nil, false", "C2"),
    "a reply of a conversation that was cut": Mutant(
        "tasks", "local function cut(id)\n  drop_mailbox(id)", "local function cut(id)", "C1"
    ),
    "an agent goes on behind a reply that the store lost": Mutant(
        "read_replies", "if has_lost(id, heard) then", "if false then", "C1|C2"
    ),
    "a reply of a turn that the log does not reach": Mutant(
        "say_replies", "tonumber(turn_end) > length", "false", "C1"
    ),
    "an old ticket counts": Mutant("conversations", "box[1] ~= ticket or", "", "C4"),
    "a mailbox outlives its task": Mutant("submit", "    drop_mailbox(id)\n", "", "C5"),
    "a submitted record is not stored": Mutant(
        "submit", "call('RENAME', record, record_key(id))", "call('UNLINK', record)", "I10"
    ),
    "a score under an old fence counts": Mutant(
        "tasks", "if task[2] ~= fence or", "if (task[2] ~= fence and not task[9]) or", "I9"
    ),
    "a unit is complete before its last score": Mutant(
        "submit",
        "if teacher ~= '-' and not is_eval then",
        "if teacher ~= '-' and not is_eval and call('SCARD', unfinished_key(whole(math.floor(id"
        " / size)))) > 1 then",
        "S1",
    ),
    "a repaired batch has records without scores": Mutant(
        "withdrawal",
        "if call('HDEL', task_key(id), 'teacher') == 1 then call('UNLINK', record_key(id)) end",
        "call('HDEL', task_key(id), 'teacher')",
        "S1",
    ),
    "a lost score is not wanted again": Mutant(
        "tasks",
        "call('ZADD', ready_key(id, teacher), -1, id)",
        "if not teacher then call('ZADD', ready_key(id, teacher), -1, id) end",
        "I2",
    ),
}


class Edit(Protocol):
    """One text of one file, exchanged for another."""

    @property
    def file(self) -> str: ...
    @property
    def old(self) -> str: ...
    @property
    def new(self) -> str: ...


def broken(mutant: Edit) -> LoadScript:
    """Scripts of a store with this mistake in it.

    Raises:
        AssertionError: the file has the text not exactly once: the mutant must follow the Lua.
    """
    body = FILES[mutant.file].read_text(encoding="utf-8")
    count = body.count(mutant.old)
    assert count == 1, f"{mutant.file}.lua must have once {mutant.old!r}, got {count} times"
    wrong = body.replace(mutant.old, mutant.new)

    def load(name: str) -> Script:
        return make_script(load_script(name).source.replace(body, wrong))

    return load
