-- ARGV: expected lineage, fork step.  -> {1, new lineage} | {0, current lineage}
-- A new learner takes the run over at the step of its checkpoint. Evaluations of its predecessors end.
local meta = call('HMGET', META, 'lineage', 'committed', 'state')
if not meta[1] then return redis.error_reply('NORUN') end
if meta[1] ~= ARGV[1] then return { 0, tonumber(meta[1]) } end
local lineage, fork = tonumber(meta[1]) + 1, tonumber(ARGV[2])
draw_on_reserve()
call('HSET', META, 'lineage', lineage, 'version', fork, 'committed', math.min(fork, tonumber(meta[2])))
if meta[3] == 'ENDED' then call('HSET', META, 'state', 'RUNNING') end
call('HSET', LINEAGES, lineage, fork)
for _, round in ipairs(call('ZRANGE', ROUNDS, 0, -1)) do
  end_round_tasks(round, 1000000)
  close_round(round)
end
return { 1, lineage }
