--- @include keys
-- ARGV: lineage, step, then per task: id, spec.  -> tasks created, each a unit of its own outside admission
local refused = refuse_learner(ARGV[1])
if refused then return refused end
local round, created = ARGV[1] .. ':' .. ARGV[2], 0
for i = 3, #ARGV, 2 do
  local id = ARGV[i]
  if call('EXISTS', task_key(id)) == 0 and call('HEXISTS', round_key(round), id) == 0 then
    call('HSET', task_key(id), 'st', 'R', 'spec', ARGV[i + 1], 'round', round)
    call('SADD', round_key(round, ':u'), id)
    call('ZADD', round_key(round, ':r'), id, id)
    created = created + 1
  end
end
if created > 0 then call('ZADD', ROUNDS, ARGV[2], round) end
return created
