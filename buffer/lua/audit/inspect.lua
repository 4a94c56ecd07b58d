--- @include keys, units
-- ARGV: task id, ..., or none for every leased training task
-- -> {id, state, fence, incarnation, length, attempts}, ...   Ended tasks are left out; one of a unit
-- that is not begun is ready.
local ids = ARGV
if #ids == 0 then ids = call('ZRANGE', LEASES, 0, -1) end
local answer = {}
for _, id in ipairs(ids) do
  local task = call('HMGET', task_key(id), 'st', 'fence', 'inc', 'len', 'att')
  if task[1] then
    answer[#answer + 1] =
      { id, task[1], task[2] or '0', task[3] or '', task[4] or '0', task[5] or '0' }
  elseif is_new(id) then
    answer[#answer + 1] = { id, 'R', '0', '', '0', '0' }
  end
end
return answer
