--- @include keys, units, conversations
-- The life of a task (field st), once its unit is begun:
--   R(eady) -> L(eased) -> D(one) -> one bit (committed, dropped, cancelled);  L -> R;  L -> X (dead)
-- In a run with teachers a training task passes R and L twice: first an actor makes its record, then, while it has the
-- field `teacher`, a teacher scores it. `made` = fence and key under which the record came.
-- Invariant: an operation on a task counts only under the fence and from the key that it was last leased under. A
-- fence alone is no secret: the tasks of one lease share it, and chunks carry it to whoever resumes one of them.

-- Returns the verdict for the holder of a fence and, where it is OK, state, length, when it last grew, bytes, the number
-- of the oldest version that its tokens may have, the last fence that it has tokens of, and its teacher.
-- A lease that expired, even a reaped one, may be revived until another actor gets it.
local function judge(id, fence, key)
  local task = call('HMGET', task_key(id), 'st', 'fence', 'key', 'len', 'progress', 'bytes', 'oldest', 'lastfence',
    'teacher', 'made')
  if not task[1] then return is_new(id) and 'STALE' or 'GONE' end
  if task[10] and task[10] == fence .. ' ' .. key then return 'DUP' end
  if task[2] ~= fence or (task[3] or key) ~= key then return 'STALE' end
  if task[1] == 'D' then return 'DUP' end
  if task[1] == 'X' then return 'STALE' end
  return 'OK', task[1], tonumber(task[4] or '0'), task[5], tonumber(task[6] or '0'), tonumber(task[7] or '0'),
    tonumber(task[8] or '0'), task[9]
end

-- Where a ready task waits: evaluation tasks wait in their round, finished ones for their teacher.
local function ready_key(id, teacher)
  if tonumber(id) >= EVAL_BASE then return round_key(call('HGET', task_key(id), 'round'), ':r') end
  return teacher and unscored_key(teacher) or READY
end

-- Back to the ready tasks, before those that are not begun.
local function give_back(id)
  local teacher = teacher_of(id)
  call('ZREM', lease_key(id, teacher), id)
  call('HSET', task_key(id), 'st', 'R')
  call('ZADD', ready_key(id, teacher), -1, id)
end

-- A lease ends for good, and its task was charged before if it was reaped, else it costs nothing.
local function return_uncharged(id, state)
  call('HDEL', task_key(id), 'fence')
  if state == 'L' then give_back(id) end
end

local RECENT_TASKS, MOST_DEATHS = 1000, 10 -- one in a hundred

-- The commonest of some values by what they have in common, and how many have it; of those, the first.
local function commonest(values, common)
  local counts, firsts, best = {}, {}, ''
  for _, value in ipairs(values) do
    local kind = common(value)
    counts[kind], firsts[kind] = (counts[kind] or 0) + 1, firsts[kind] or value
    if counts[kind] > (counts[best] or 0) then best = kind end
  end
  return firsts[best], counts[best]
end

local function itself(value) return value end

-- The file and line of a reason: exceptions of one line name other items and values in each episode.
local function place(reason) return string.match(reason, ' at (%S+:%d+)') or reason end

-- When more than one in a hundred of the recent tasks died, no more is leased until an operator says so.
local function note_death(id)
  local units = tonumber(call('HGET', META, 'arrivals') or '0')
  call('ZADD', DEATHS, units, id)
  call('ZREMRANGEBYSCORE', DEATHS, '-inf', units - RECENT_TASKS / group_size())
  local ids = call('ZRANGE', DEATHS, 0, -1)
  if #ids <= MOST_DEATHS then return end
  local reasons, holders = {}, {}
  for i, dead in ipairs(ids) do
    local task = call('HMGET', task_key(dead), 'why', 'inc')
    reasons[i], holders[i] = task[1] or '', task[2] or ''
  end
  local why, count = commonest(reasons, place)
  local holder, held = commonest(holders, itself)
  call('HSET', META, 'paused', #ids .. ' of the last ' .. RECENT_TASKS .. ' tasks died, ' .. count ..
    ' of them of: ' .. string.sub(why, 1, 400) .. '; ' .. held .. ' in the hands of ' .. holder)
end

local function fail_task(id, why, is_noted)
  local teacher = teacher_of(id)
  drop_mailbox(id)
  call('ZREM', lease_key(id, teacher), id)
  call('ZREM', ready_key(id, teacher), id)
  if tonumber(id) >= EVAL_BASE then
    local round = call('HGET', task_key(id), 'round')
    call('SREM', round_key(round, ':u'), id)
    call('SADD', round_key(round, ':x'), id)
    call('UNLINK', task_key(id), chunks_key(id))
  else
    call('HSET', task_key(id), 'st', 'X', 'why', why)
    if teacher then call('HSET', task_key(id), 'record', 1) end
    call('ZADD', DEAD, now_ms(), id)
    if is_noted then note_death(id) end
    lose_member(id)
  end
end

-- Whether the failures of a task may be the fault of the holder that has most of them: none is another's, or of three
-- holders only one, which may be bad luck beside that one's bad will. `by` has the tag of each failure's key on a line.
-- Where all keys are one holder's they are compared with each other; nothing is compared with a lone one.
local function may_be_one_holders(by, key)
  local holders, failures, worst, counts = call('ZCARD', HOLDERS), 0, 0, {}
  local others_needed = holders < 2 and (key == holder_of(key) and 0 or 1) or math.min(2, holders - 1)
  for tag in string.gmatch(by, '([^\n]*)\n') do
    local owner = holders < 2 and tag or holder_of(tag)
    failures, counts[owner] = failures + 1, (counts[owner] or 0) + 1
    if owner ~= '' then worst = math.max(worst, counts[owner]) end
  end
  return worst > 0 and failures - worst < others_needed
end

-- After a failure: dead if it was the last of so many, else ready again. Nothing dies while leasing is paused, or a
-- fault of the run would take all that is leased. What may be one holder's fault dies after three times as many,
-- because a task that only one of them gets has to end, too, and says nothing of the run.
local function end_attempt(id, failures, by, key, most, why)
  local is_theirs = may_be_one_holders(by, key)
  if failures < most * (is_theirs and 3 or 1) or call('HEXISTS', META, 'paused') == 1 then
    give_back(id)
  else
    fail_task(id, why, not is_theirs)
  end
end

-- One more attempt failed through no fault of the task. One that added tokens is the first again.
local function charge(id, max_attempts, why)
  local task = call('HMGET', task_key(id), 'att', 'len', 'lastlen', 'lost_by', 'key')
  local attempts, length = tonumber(task[1] or '0') + 1, tonumber(task[2] or '0')
  local by, key = task[4] or '', task[5] or ''
  if length > tonumber(task[3] or '0') then attempts, by = 1, '' end
  by = by .. key .. '\n'
  call('HSET', task_key(id), 'att', attempts, 'lastlen', length, 'lost_by', by)
  end_attempt(id, attempts, by, key, max_attempts, why)
end

-- A lease ends, and its holder cannot revive it either; one that was reaped has been charged before.
local function take_away(id, state, max_attempts, why)
  call('HDEL', task_key(id), 'fence')
  if state == 'L' then charge(id, max_attempts, why) end
end

-- An unfinished completion goes, and its agent's mailbox with it; its task begins anew.
local function cut(id)
  drop_mailbox(id)
  call('UNLINK', chunks_key(id))
  call('HDEL', task_key(id), 'len', 'lastlen', 'bytes', 'lastfence')
end

-- The task itself failed: such failures have a budget of their own, which no progress refills.
local function charge_data(id, max_failures, why)
  local task = call('HMGET', task_key(id), 'fails', 'failed_by', 'key')
  local failures, key = tonumber(task[1] or '0') + 1, task[3] or ''
  local by = (task[2] or '') .. key .. '\n'
  call('HSET', task_key(id), 'fails', failures, 'failed_by', by)
  call('HINCRBY', META, 'data_failures', 1)
  call('HSET', META, 'data_failure', why)
  end_attempt(id, failures, by, key, max_failures, why)
end

-- A conversation ends through no fault of the task, because its host or the store lost it, and the task begins anew,
-- under another lease. Such losses have a budget of their own, too.
local function lose_conversation(id, most, why, key)
  local task = call('HMGET', task_key(id), 'losses', 'losses_by', 'st')
  if task[3] ~= 'R' and task[3] ~= 'L' then return drop_mailbox(id) end -- the task has ended
  local losses, by = tonumber(task[1] or '0') + 1, (task[2] or '') .. key .. '\n'
  cut(id)
  call('HDEL', task_key(id), 'fence')
  call('HSET', task_key(id), 'losses', losses, 'losses_by', by)
  end_attempt(id, losses, by, key, most, why)
end

-- Ends some leases by a field of theirs, without their fences, so that no message on its way revives one.
local function end_leases(field, matches, finish)
  local ended = {}
  for _, leases in ipairs({ LEASES, SCORE_LEASES, EVAL_LEASES }) do
    for _, id in ipairs(call('ZRANGE', leases, 0, -1)) do
      -- A member that just died may have ended its unit, and with it the leases of the others.
      if matches(call('HGET', task_key(id), field), id) and call('ZSCORE', leases, id) then
        call('HDEL', task_key(id), 'fence')
        finish(id)
        ended[#ended + 1] = id
      end
    end
  end
  return ended
end

-- A dead letter as it is listed.
local function dead_letter_row(id, ms)
  local task = call('HMGET', task_key(id), 'why', 'att', 'fails', 'losses', 'len')
  return { id, ms, task[1] or '', (task[2] or 0) + (task[3] or 0) + (task[4] or 0), tonumber(task[5] or '0') }
end
