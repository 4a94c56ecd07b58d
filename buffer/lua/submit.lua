-- ARGV: per task: id, fence, record of an evaluation.  -> verdict, ...
-- Records of training tasks came before, in the same transaction, which a full Redis refuses whole.
-- Each is moved to its task, or unlinked.
local size = group_size()
local answer, leased, done, units, members_of = {}, {}, {}, {}, {}
local taken = 0

local function next_record()
  taken = taken + 1
  return run .. ':in:' .. taken
end

local function finish(id, record, state)
  call('RENAME', record, record_key(id))
  if state == 'L' then leased[#leased + 1] = id else call('ZREM', READY, id) end
  done[#done + 1] = id
  local gid = whole(math.floor(id / size))
  if not members_of[gid] then
    units[#units + 1] = gid
    members_of[gid] = {}
  end
  table.insert(members_of[gid], id)
end

local function finish_eval(id, record)
  local round = call('HGET', task_key(id), 'round')
  call('HSET', round_key(round), id, record)
  call('ZREM', lease_key(id), id)
  call('ZREM', ready_key(id), id)
  call('SREM', round_key(round, ':u'), id)
end

for i = 1, #ARGV, 3 do
  local id = ARGV[i]
  local is_eval = tonumber(id) >= EVAL_BASE
  local record = is_eval and ARGV[i + 2] or next_record()
  local verdict, state, length = judge(id, ARGV[i + 1])
  if verdict == 'OK' then
    if is_eval then finish_eval(id, record) else finish(id, record, state) end
    if length > 0 then call('UNLINK', chunks_key(id)) end
    call('HSET', task_key(id), 'st', 'D')
  elseif not is_eval then
    call('UNLINK', record)
  end
  answer[#answer + 1] = verdict
end
if #leased > 0 then call('ZREM', run .. ':lease', unpack(leased)) end
if #done > 0 then call('SADD', DONE, unpack(done)) end
for _, gid in ipairs(units) do finish_members(gid, members_of[gid]) end
return answer
