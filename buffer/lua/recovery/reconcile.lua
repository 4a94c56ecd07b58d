--- @include keys, withdrawal
-- ARGV: lineage, k, units of the batch, mask it was sealed with ('' = unsealed), position of the first, then group ids.  -> units moved
-- The units that batch k has for the learner; wherever this store has them, they move to that claim. Their
-- records may be gone. Scores below zero keep the learner's order and mark them apart from the rest.
local refused = refuse_learner(ARGV[1])
if refused then return refused end
local k, total, size, moved = ARGV[2], tonumber(ARGV[3]), group_size(), 0
local claim = claim_key(k)
draw_on_reserve()
if ARGV[5] == '0' then
  for _, gid in ipairs(call('ZRANGEBYSCORE', claim, '-inf', '(0')) do -- of an earlier call
    call('ZADD', claim, call('HINCRBY', META, 'arrivals', 1), gid)
  end
end
for i = 6, #ARGV do
  local gid = ARGV[i]
  local ids = members(gid, size)
  if not is_committed(ids) then
    withdraw_unit(gid)
    local spared = dead_but_not_all(ids)
    for _, id in ipairs(ids) do
      if not spared[id] then
        withdraw_task(id)
        call('HSET', task_key(id), 'st', 'D', 'reconciled', 1)
        call('SADD', CLAIMED, id)
      end
    end
    call('ZADD', claim, tonumber(ARGV[5]) + i - 6 - total, gid)
    moved = moved + 1
  end
end
if tonumber(ARGV[5]) + #ARGV - 5 < total then return moved end

-- The last slice: what this store had in the batch besides was not trained with it.
local others = call('ZRANGEBYSCORE', claim, 0, '+inf', 'WITHSCORES')
for i = 1, #others, 2 do
  call('ZREM', claim, others[i])
  call('ZADD', BUF, others[i + 1], others[i])
  for _, id in ipairs(members(others[i], size)) do call('SMOVE', CLAIMED, DONE, id) end
end
if call('EXISTS', claim) == 0 then
  call('UNLINK', claim_state_key(k))
  call('ZREM', CLAIMS, k)
else
  call('ZADD', CLAIMS, k, k)
  if ARGV[4] ~= '' then call('HSET', claim_state_key(k), 'sealed', ARGV[4]) end
end
return moved
