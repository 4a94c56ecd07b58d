-- ARGV: expected lineage, fork step, owner.  -> {1, new lineage} | {0, current lineage}
-- A new learner takes the run over at the step of its checkpoint. Evaluations of its predecessors end.
-- The owner is one call's: a call whose reply was lost is sent again and finds the lineage its own.
local meta = call('HMGET', META, 'lineage', 'committed', 'state', 'owner')
if not meta[1] then return redis.error_reply('NORUN') end
if tonumber(meta[1]) == tonumber(ARGV[1]) + 1 and meta[4] == ARGV[3] then return { 1, tonumber(meta[1]) } end
if meta[1] ~= ARGV[1] then return { 0, tonumber(meta[1]) } end
local lineage, fork = tonumber(meta[1]) + 1, tonumber(ARGV[2])
draw_on_reserve()
call('HSET', META, 'lineage', lineage, 'owner', ARGV[3], 'version', fork,
  'committed', math.min(fork, tonumber(meta[2])))
if meta[3] == 'ENDED' then call('HSET', META, 'state', 'RUNNING') end
call('HSET', LINEAGES, lineage, fork)
for _, round in ipairs(call('ZRANGE', ROUNDS, 0, -1)) do
  end_round_tasks(round, 1000000)
  close_round(round)
end
return { 1, lineage }
