--- @include keys, withdrawal
-- ARGV: id, ...  -> verdict, ...
-- READY: it is made again from where it was, or waits for its score again, for a unit that still waits. ANEW: its unit
-- begins again, all members with it. TRAINED: too late, its unit is in a batch. ENDED: so is the run. GONE: no dead
-- letter. FORGOTTEN: the store has lost its spec.
local size, state = group_size(), call('HGET', META, 'state')

local function is_taken(ids)
  for _, id in ipairs(ids) do
    if call('SISMEMBER', CLAIMED, id) == 1 then return true end
  end
  return is_committed(ids)
end

local function revive(id, gid)
  local teacher = teacher_of(id)
  call('ZREM', DEAD, id)
  if not teacher then call('UNLINK', record_key(id)) end
  call('HDEL', task_key(id), 'att', 'fails', 'failed_by', 'lost_by', 'losses', 'losses_by', 'lastlen', 'why', 'fence', 'record')
  call('HSET', task_key(id), 'st', 'R')
  call('ZREM', BUF, gid)
  call('SADD', OPEN, gid)
  call('SADD', unfinished_key(gid), id)
  call('ZADD', teacher and unscored_key(teacher) or READY, -1, id)
end

-- The unit has ended: dropped because too few were left, or poisonous. A unit asks one question, so the
-- spec of a member that is gone is that of this one, or of another. False: the store has forgotten it.
local function begin_anew(id, gid, ids)
  local specs, known = {}, call('HGET', task_key(id), 'spec')
  for i, member in ipairs(ids) do
    specs[i] = call('HGET', task_key(member), 'spec')
    known = known or specs[i]
  end
  if not known then return false end
  for i, member in ipairs(ids) do
    specs[i] = specs[i] or known
    withdraw_task(member)
    call('UNLINK', task_key(member), chunks_key(member), record_key(member))
  end
  call('RPUSH', specs_key(gid), unpack(specs))
  call('ZADD', NEW, gid, gid)
  return true
end

local function requeue(id)
  if not call('ZSCORE', DEAD, id) then return 'GONE' end
  local gid = whole(math.floor(id / size))
  local ids = members(gid, size)
  if is_taken(ids) then return 'TRAINED' end
  if state == 'ENDED' then return 'ENDED' end
  if call('SISMEMBER', OPEN, gid) == 1 or call('ZSCORE', BUF, gid) then
    revive(id, gid)
    return 'READY'
  end
  return begin_anew(id, gid, ids) and 'ANEW' or 'FORGOTTEN'
end

local answer = {}
for i, id in ipairs(ARGV) do answer[i] = requeue(id) end
return answer
