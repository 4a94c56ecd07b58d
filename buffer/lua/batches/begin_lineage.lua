--- @include keys, rounds
-- ARGV: expected lineage, fork step, owner, least new lineage.  -> {1, new lineage} | {0, current lineage}
-- A new learner takes the run over at the step of its checkpoint. Evaluations of its predecessors end.
-- A store that lost writes may remember less than its learners do: they name the least number that
-- none of them has had. The owner is one call's: a call whose reply was lost is sent again and finds
-- the lineage its own.
local meta = call('HMGET', META, 'lineage', 'committed', 'state', 'owner', 'gen', 'seen')
if not meta[1] then return redis.error_reply('NORUN') end
local lineage, fork = math.max(tonumber(ARGV[1]) + 1, tonumber(ARGV[4])), tonumber(ARGV[2])
if tonumber(meta[1]) == lineage and meta[4] == ARGV[3] then return { 1, tonumber(meta[1]) } end
if meta[1] ~= ARGV[1] then return { 0, tonumber(meta[1]) } end
draw_on_reserve()
call('HSET', META, 'lineage', lineage, 'owner', ARGV[3], 'version', fork,
  'committed', math.min(fork, tonumber(meta[2])))
if meta[3] == 'ENDED' then call('HSET', META, 'state', meta[5] == meta[6] and 'RUNNING' or 'RECOVERING') end
-- Numbers left out were lineages that this store forgot; what they forked from is older than this.
for forgotten = tonumber(meta[1]) + 1, lineage do call('HSET', LINEAGES, forgotten, fork) end
for _, round in ipairs(call('ZRANGE', ROUNDS, 0, -1)) do
  end_round_tasks(round, 1000000)
  close_round(round)
end
return { 1, lineage }
