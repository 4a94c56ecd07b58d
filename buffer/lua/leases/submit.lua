--- @include keys, units, tasks, conversations
-- ARGV: lines of 'id fence oldest-version teacher key', then the records of evaluations among these tasks.
-- -> verdict, ...   TAKEN: tokens are older than the lease allows; the task goes to others, and costs it nothing.
-- A record that names a teacher ('-' = none) waits for its score; from the teacher it comes again, and is done.
-- Records of training tasks came before, in the same transaction, which a full Redis refuses whole.
-- Each is moved to its task, or unlinked.
local size = group_size()
local answer, leased, done, units, members_of = {}, {}, {}, {}, {}
local trainings, evals = 0, 0

-- The task begins anew as one to score: with its record, all its attempts, and a place in the order of ids.
local function await_score(id, teacher, made)
  cut(id)
  call('HDEL', task_key(id), 'fence', 'att', 'lost_by', 'fails', 'failed_by', 'losses', 'losses_by')
  call('HSET', task_key(id), 'st', 'R', 'teacher', teacher, 'made', made)
  call('SADD', TEACHERS, teacher)
  call('ZADD', unscored_key(teacher), id, id)
end

local function store(id, record, state, scored_by)
  call('RENAME', record, record_key(id))
  if state ~= 'L' then
    call('ZREM', ready_key(id, scored_by), id)
  elseif scored_by then
    call('ZREM', SCORE_LEASES, id)
  else
    leased[#leased + 1] = id
  end
end

local function finish(id)
  done[#done + 1] = id
  local gid = math.floor(id / size)
  local ids = members_of[gid]
  if not ids then
    ids, units[#units + 1] = {}, gid
    members_of[gid] = ids
  end
  ids[#ids + 1] = id
end

local function finish_eval(id, record)
  local round = call('HGET', task_key(id), 'round')
  call('HSET', round_key(round), id, record)
  call('ZREM', EVAL_LEASES, id)
  call('ZREM', ready_key(id), id)
  call('SREM', round_key(round, ':u'), id)
end

for id, fence, oldest, teacher, key in string.gmatch(ARGV[1], '(%d+) (%d+) (%d+) (%S+) ([^\n]*)') do
  local is_eval, record = tonumber(id) >= EVAL_BASE, nil
  if is_eval then
    evals = evals + 1
    record = ARGV[1 + evals]
  else
    trainings = trainings + 1
    record = run .. ':in:' .. trainings
  end
  local verdict, state, length, _, _, least, _, scored_by = judge(id, fence, key)
  if verdict == 'OK' and teacher ~= '-' and scored_by then verdict = 'STALE' end
  if verdict == 'OK' and tonumber(oldest) < least then
    verdict = 'TAKEN'
    return_uncharged(id, state)
  end
  if verdict == 'OK' then
    if is_eval then finish_eval(id, record) else store(id, record, state, scored_by) end
    if teacher ~= '-' and not is_eval then
      await_score(id, teacher, fence .. ' ' .. key)
    else
      if not is_eval then finish(id) end
      if length > 0 then call('UNLINK', chunks_key(id)) end
      if scored_by then call('HDEL', task_key(id), 'teacher') end
      drop_mailbox(id)
      call('HSET', task_key(id), 'st', 'D')
    end
  elseif not is_eval then
    call('UNLINK', record)
  end
  answer[#answer + 1] = verdict
end
if #leased > 0 then call('ZREM', LEASES, unpack(leased)) end
if #done > 0 then call('SADD', DONE, unpack(done)) end
for _, gid in ipairs(units) do finish_members(whole(gid), members_of[gid]) end
return answer
