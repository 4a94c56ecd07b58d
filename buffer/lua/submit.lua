-- ARGV: per task: id, fence, record.  -> verdict, ...
-- The record is the first write: a full Redis refuses the call whole.
local size = group_size()
local answer = {}
for i = 1, #ARGV, 3 do
  local id = ARGV[i]
  local verdict, state, length = judge(id, ARGV[i + 1])
  if verdict == 'OK' then
    local round = tonumber(id) >= EVAL_BASE and call('HGET', task_key(id), 'round')
    if round then
      call('HSET', round_key(round), id, ARGV[i + 2])
    else
      call('SET', record_key(id), ARGV[i + 2])
    end
    if state == 'L' then call('ZREM', lease_key(id), id) else call('ZREM', ready_key(id), id) end
    if length > 0 then call('UNLINK', chunks_key(id)) end
    call('HSET', task_key(id), 'st', 'D')
    if round then
      call('SREM', round_key(round, ':u'), id)
    else
      call('SADD', DONE, id)
      finish_member(string.format('%.0f', math.floor(id / size)), id)
    end
  end
  answer[#answer + 1] = verdict
end
return answer
