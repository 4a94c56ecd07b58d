--- @include keys
-- ARGV: most contradictions to name.  -> {id, place, state}, ...
-- Every set that holds a live task, against the state that the task itself gives.
local answer = {}
local function compare(place, state, ids)
  for _, id in ipairs(ids) do
    local found = call('HGET', task_key(id), 'st') or 'none'
    if found ~= state and #answer < tonumber(ARGV[1]) then
      answer[#answer + 1] = { id, place, found }
    end
  end
end
compare('ready', 'R', call('ZRANGE', READY, 0, -1))
compare('lease', 'L', call('ZRANGE', LEASES, 0, -1))
compare('lease:score', 'L', call('ZRANGE', SCORE_LEASES, 0, -1))
for _, teacher in ipairs(call('SMEMBERS', TEACHERS)) do
  compare('unscored', 'R', call('ZRANGE', unscored_key(teacher), 0, -1))
end
compare('done', 'D', call('SMEMBERS', DONE))
compare('claimed', 'D', call('SMEMBERS', CLAIMED))
compare('dead', 'X', call('ZRANGE', DEAD, 0, -1))
for _, id in ipairs(call('SINTER', DONE, CLAIMED)) do answer[#answer + 1] = { id, 'done', 'claimed' } end
return answer
