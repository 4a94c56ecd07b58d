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
    Bug("beats", "offset + tokens > length and 'GAP'", "offset + tokens >= length and 'GAP'"),
    Bug("beats", "now - math.max(since, grace", "now - math.min(since, grace"),
    Bug("fail", "charge(id, tonumber(ARGV[2]), reason)", "charge(id, tonumber(ARGV[3]), reason)"),
    Bug("lease", "'LIMIT', 0, room)", "'LIMIT', 0, room + 1)"),
    Bug("lease", "(room < size and #picked > 0)", "(room <= size and #picked > 0)"),
    Bug("lease", "call('ZADD', READY, id, id)", "call('ZADD', READY, -1, id)"),
    Bug("reap", "gap > math.max(ttl / 2", "gap > math.min(ttl / 2"),
    Bug("reap", "leases, '-inf', now, 'LIMIT'", "leases, '-inf', '(' .. now, 'LIMIT'"),
    Bug("tasks", "        call('HDEL', task_key(id), 'fence')", ""),
    Bug("tasks", "if state == 'L' then give_back", "if state == 'R' then give_back"),
    Bug("submit", "if length > 0 then call('UNLINK', chunks_key(id)) end", ""),
    Bug("submit", "    call('ZREM', ready_key(id, scored_by), id)\n", ""),
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
    Bug("beats", "    call('DEL', chunks)\n", ""),
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
    Bug("reconcile", "if ARGV[4] ~= '' then", "if ARGV[4] == '' then"),
    Bug("publish", "known[2] == ARGV[2] and", "known[2] ~= ARGV[2] and"),
)
"""Written when the histories found those above, before they met any of these."""

CONVERSATIONS = (
    Bug("say_replies", "verdict == 'OK' and tonumber(turn_end) > length", "false"),
    Bug("say_replies", "tonumber(turn_end) > length", "offset + tokens > length"),
    Bug("say_replies", "if verdict == 'OK' and is_of_another(id, ticket) then", "if false then"),
    Bug("say_replies", "elseif verdict == 'OK' then\n      say(", "else\n      say("),
    Bug("say_replies", "verdict = why or 'OK'", "verdict = 'OK'"),
    Bug("say_replies", "if said ~= number .. '\\n' .. reply then return 'OTHER' end", ""),
    Bug("say_replies", "call('HGET', mailbox, 'newest') or '0'", "'0'"),
    Bug("say_replies", "call('HINCRBY', mailbox, 'bytes', #reply)", ""),
    Bug("add_calls", "number > calls + 1", "number > calls + 2"),
    Bug("add_calls", "calls - replies >= most_open", "calls - replies > most_open"),
    Bug("add_calls", "or bytes + #tail > most_bytes", ""),
    Bug("add_calls", "if keep > size then", "if keep >= size then"),
    Bug(
        "add_calls",
        "if calls == replies then call('HSET', mailbox, 'opened'",
        "if calls then call('HSET', mailbox, 'opened'",
    ),
    Bug("conversations", "if box[1] == box[2] and not box[4] then", "if box[1] == box[2] then"),
    Bug("conversations", "box[1] ~= ticket or box[2] ~= key", "box[1] ~= ticket"),
    Bug("conversations", "    call('ZREM', WANTED, id)\n", ""),
    Bug("conversations", "    call('ZREM', TICKETS, id)\n", ""),
    Bug("conversations", "heard ~= '0' and call('ZCOUNT'", "call('ZCOUNT'"),
    Bug("read_replies", "if has_lost(id, heard) then", "if false then"),
    Bug("end_conversations", "and has_lost(id, heard) then", "and false then"),
    Bug("read_replies", "math.max(ticket / 1000, grace_until)", "ticket / 1000"),
    Bug("read_replies", "not has_ended and now", "now"),
    Bug("read_replies", "    note_silence(id)\n", ""),
    Bug("read_replies", "    if not why then\n      renewed", "    if why then\n      renewed"),
    Bug("read_replies", "has_news and heard or '0'", "'0'"),
    Bug("read_replies", "if has_news then read(", "if false then read("),
    Bug("read_replies", "replies_key(id), '(' .. last", "replies_key(id), last"),
    Bug("read_replies", "room > 0 do", "room >= 0 do"),
    Bug(
        "read_calls",
        "known ~= '0' and box[1] ~= known",
        "known ~= '0' and box[1] and box[1] ~= known",
    ),
    Bug("read_calls", "tonumber(box[5]) < tonumber(ARGV[i + 4])", "false"),
    Bug("read_calls", "if box[3] and room > 0 then", "if box[3] then"),
    Bug("end_conversations", ">= tonumber(order)", "> tonumber(order)"),
    Bug("end_conversations", "#text - #(box[3] or '')", "#text"),
    Bug("end_conversations", "number ~= '0' and (bytes", "(bytes"),
    Bug("end_conversations", "rewards > most_rewards", "rewards >= most_rewards"),
    Bug("end_conversations", "why ~= '' and refused ~= 'FULL'", "why ~= ''"),
    Bug("end_conversations", "      note_silence(id)\n", ""),
    Bug("end_conversations", "verdict == 'OK' and ended", "verdict == 'OK' and ended == why"),
    Bug("end_conversations", "call('ZREM', TICKETS, id)", ""),
    Bug("end_conversations", ", 'opened', whole(now_ms())", ""),
    Bug("take_conversations", "  call('ZREM', WANTED, id)\n", ""),
    Bug("take_conversations", "tonumber(known[1]) > tonumber(ARGV[6])", "false"),
    Bug("take_conversations", "box[2] == '0' and not box[3]", "box[2] == '0'"),
    Bug("take_conversations", "box[1] == known[1] and box[2] == '0'", "box[1] == known[1]"),
    Bug("take_conversations", "if left > 0 and", "if left > 1000 and"),
    Bug("take_conversations", "  n = 1\n", ""),
    Bug("take_conversations", "2 ^ (silent - MOST_SILENT)", "2 ^ silent"),
    Bug("take_conversations", "if room <= 0 then break end", ""),
    Bug("add_calls", "call('HDEL', host_key(box[1], box[2]), 'silent', 'rests_until')", ""),
    Bug("conversations", "if box[1] == '0' and box[2] then", "if box[2] then"),
    Bug("reap", "    note_silence(id)\n", ""),
    Bug("fail", "if has_ended then cut(id) end", ""),
    Bug("fail", "    elseif has_ended then\n", "    elseif false then\n"),
    Bug("want_agents", "verdict == 'OK' and length > 0", "verdict == 'OK' and length > 1"),
    Bug("reap", "if box[1] == '0' and (state", "if box[1] == '1' and (state"),
    Bug("reap", "EVAL_LEASES, TICKETS }", "EVAL_LEASES }"),
    Bug("beats", "return why_since(turn_began(id, now))", "return why_since(0)"),
    Bug("beats", " and not is_uncalled(id)", ""),
    Bug("beats", "and has_replies(id) then", "and mailbox_bytes(id) > 4 then"),
    Bug("share", "if turn <= 0 then return false end", ""),
    Bug("share", "math.min(lease.idle, turn)", "lease.idle"),
    Bug("shrink", " + mailbox_bytes(id)", ""),
    Bug("submit", "    drop_mailbox(id)\n", ""),
    Bug("units", "      drop_mailbox(id)\n", ""),
    Bug("rounds", "    drop_mailbox(id)\n", ""),
    Bug("withdrawal", "  drop_mailbox(id)\n", ""),
    Bug("tasks", "local function cut(id)\n  drop_mailbox(id)\n", "local function cut(id)\n"),
    Bug(
        "tasks",
        "call('HDEL', task_key(id), 'fence')\n  call('HSET', task_key(id), 'losses'",
        "call('HSET', task_key(id), 'losses'",
    ),
    Bug("lease", "begun_only and '(0' or '+inf'", "'+inf'"),
    Bug("lease", "room > 0 and not begun_only", "room > 0"),
    Bug("read_news", "if known > newest then known = 0 end", ""),
)
"""Of mailboxes: what a reply, a ticket or a wait could be judged by wrongly."""

TEACHERS = (
    Bug("submit", "and scored_by then verdict = 'STALE'", "and scored_by then verdict = 'DUP'"),
    Bug("submit", "    call('ZREM', SCORE_LEASES, id)\n", ""),
    Bug("submit", "'fence', 'att', 'lost_by',", "'att', 'lost_by',"),
    Bug("submit", "'fence', 'att', 'lost_by',", "'fence', 'lost_by',"),
    Bug("submit", "'fails', 'failed_by', 'losses'", "'losses'"),
    Bug("submit", "call('ZADD', unscored_key(teacher), id, id)", "call('ZADD', READY, id, id)"),
    Bug("submit", "fence .. ' ' .. key)", "fence .. ' ')"),
    Bug("submit", "  call('SADD', TEACHERS, teacher)\n", ""),
    Bug("submit", "if scored_by then call('HDEL', task_key(id), 'teacher') end", ""),
    Bug("tasks", "task[10] == fence .. ' ' .. key then", "task[10] then"),
    Bug("tasks", "if teacher then call('HSET', task_key(id), 'record', 1) end", ""),
    Bug(
        "tasks", "ipairs({ LEASES, SCORE_LEASES, EVAL_LEASES })", "ipairs({ LEASES, EVAL_LEASES })"
    ),
    Bug("reap", "SCORE_LEASES, EVAL_LEASES }) do", "EVAL_LEASES }) do"),
    Bug("reap", "SCORE_LEASES, EVAL_LEASES, TICKETS", "EVAL_LEASES, TICKETS"),
    Bug("lease", "(teacher or not end_pause", "(not end_pause"),
    Bug("lease", "teacher and { SCORE_LEASES } or", "false and { SCORE_LEASES } or"),
    Bug(
        "lease",
        "  pick_ready(unscored_key(teacher))\n  room = 0\n",
        "  pick_ready(unscored_key(teacher))\n",
    ),
    Bug("lease", "if ARGV[6] ~= '' and not teacher then", "if ARGV[6] ~= '' then"),
    Bug("lease", "0, { call('GET', record_key(id)) } }", "0, {} }"),
    Bug("beats", "tokens > 0 and not teacher and", "tokens > 0 and"),
    Bug("keys", "teacher and unscored_key(teacher) or READY, id)", "READY, id)"),
    Bug("withdrawal", " == 1 then call('UNLINK', record_key(id)) end", " == 2 then return end"),
    Bug(
        "requeue_dead",
        "if not teacher then call('UNLINK', record_key(id)) end",
        "call('UNLINK', record_key(id))",
    ),
    Bug("requeue_dead", "teacher and unscored_key(teacher) or READY, -1", "READY, -1"),
    Bug("usage", "local with_records = { SCORE_LEASES }", "local with_records = {}"),
    Bug("stats", "'scoring', call('ZCARD', SCORE_LEASES)", "'scoring', call('ZCARD', LEASES)"),
)
"""Of finished tasks that wait for their score."""

LISTS = {"first": FIRST, "second": SECOND, "conversations": CONVERSATIONS, "teachers": TEACHERS}
