--- @include keys
-- ARGV: lineage, k, mask ('1' = none), then per unit to keep for reuse: group id, rating (see replay.lua).
-- -> units in the frozen batch
local refused = refuse_learner(ARGV[1])
if refused then return refused end
local units = call('ZCARD', claim_key(ARGV[2]))
if units == 0 then return redis.error_reply('UNCLAIMED ' .. ARGV[2]) end
draw_on_reserve()
for i = 4, #ARGV, 2 do call('HSET', claim_state_key(ARGV[2]), 'keep:' .. ARGV[i], ARGV[i + 1]) end
call('HSET', claim_state_key(ARGV[2]), 'sealed', ARGV[3])
return units
