--- @include keys, units
-- The life of a task (field st), once its unit is begun:
--   R(eady) -> L(eased) -> D(one) -> one bit (committed, dropped, cancelled);  L -> R;  L -> X (dead)
-- Invariant: an operation on a task counts only under the fence it was last leased under.

-- Returns the verdict for the holder of a fence and, where it is OK, state, length, when it last grew, and bytes.
-- A lease that expired, even a reaped one, may be revived until another actor gets it.
local function judge(id, fence)
  local task = call('HMGET', task_key(id), 'st', 'fence', 'len', 'progress', 'bytes')
  if not task[1] then return is_new(id) and 'STALE' or 'GONE' end
  if task[2] ~= fence then return 'STALE' end
  if task[1] == 'D' then return 'DUP' end
  if task[1] == 'X' then return 'STALE' end
  return 'OK', task[1], tonumber(task[3] or '0'), task[4], tonumber(task[5] or '0')
end

-- Where a ready task waits: evaluation tasks wait in their round.
local function ready_key(id)
  if tonumber(id) < EVAL_BASE then return READY end
  return round_key(call('HGET', task_key(id), 'round'), ':r')
end

-- Back to the ready tasks, before those that are not begun.
local function give_back(id)
  call('ZREM', lease_key(id), id)
  call('HSET', task_key(id), 'st', 'R')
  call('ZADD', ready_key(id), -1, id)
end

local function fail_task(id, why)
  call('ZREM', lease_key(id), id)
  call('ZREM', ready_key(id), id)
  if tonumber(id) >= EVAL_BASE then
    local round = call('HGET', task_key(id), 'round')
    call('SREM', round_key(round, ':u'), id)
    call('SADD', round_key(round, ':x'), id)
    call('UNLINK', task_key(id), chunks_key(id))
  else
    call('HSET', task_key(id), 'st', 'X', 'why', why)
    call('ZADD', DEAD, now_ms(), id)
    lose_member(id)
  end
end

-- One more attempt failed through no fault of the task. One that added tokens is the first again.
local function charge(id, max_attempts, why)
  call('ZREM', lease_key(id), id)
  local task = call('HMGET', task_key(id), 'att', 'len', 'lastlen')
  local attempts, length = tonumber(task[1] or '0') + 1, tonumber(task[2] or '0')
  if length > tonumber(task[3] or '0') then attempts = 1 end
  call('HSET', task_key(id), 'att', attempts, 'lastlen', length)
  if attempts >= max_attempts then fail_task(id, why) else give_back(id) end
end

-- A lease ends, and its holder cannot revive it either; one that was reaped has been charged before.
local function take_away(id, state, max_attempts, why)
  call('HDEL', task_key(id), 'fence')
  if state == 'L' then charge(id, max_attempts, why) end
end

-- An unfinished completion goes; its task begins anew.
local function cut(id)
  call('UNLINK', chunks_key(id))
  call('HDEL', task_key(id), 'len', 'lastlen', 'bytes')
end

-- The task itself failed: such failures have a budget of their own, which no progress refills.
local function charge_data(id, max_failures, why)
  call('ZREM', lease_key(id), id)
  if call('HINCRBY', task_key(id), 'fails', 1) >= max_failures then fail_task(id, why) else give_back(id) end
end

-- A dead letter as it is listed.
local function dead_letter_row(id, ms)
  local task = call('HMGET', task_key(id), 'why', 'att', 'fails', 'len')
  return { id, ms, task[1] or '', (task[2] or 0) + (task[3] or 0), tonumber(task[4] or '0') }
end
