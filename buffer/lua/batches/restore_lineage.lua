--- @include keys, rounds
-- ARGV: lineage, its owner, step, then lineage, step it forked at, ...  -> 1 if the store had lost it
-- The store forgot that this learner took the run over: it gets back the lineage that it has, which is
-- above all that the store has. A learner that took over meanwhile from an older one is LOST.
local meta = call('HMGET', META, 'lineage', 'committed', 'owner')
if not meta[1] then return redis.error_reply('NORUN') end
local stored, lineage, step = tonumber(meta[1]), tonumber(ARGV[1]), tonumber(ARGV[3])
if stored > lineage or (stored == lineage and meta[3] ~= ARGV[2]) then
  return redis.error_reply('LOST ' .. stored)
end
draw_on_reserve()
for i = 4, #ARGV, 2 do call('HSET', LINEAGES, ARGV[i], ARGV[i + 1]) end
if stored == lineage then return 0 end
call('HSET', META, 'lineage', lineage, 'owner', ARGV[2], 'version', step,
  'committed', math.min(step, tonumber(meta[2])))
for _, round in ipairs(call('ZRANGE', ROUNDS, 0, -1)) do
  end_round_tasks(round, 1000000)
  close_round(round)
end
return 1
