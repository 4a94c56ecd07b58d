--- @include keys, units
-- ARGV: lineage, k, reason, group id, ...  -> tasks dropped
local refused = refuse_learner(ARGV[1])
if refused then return refused end
if call('HEXISTS', claim_state_key(ARGV[2]), 'sealed') == 1 then return redis.error_reply('SEALED ' .. ARGV[2]) end
local size, dropped = group_size(), 0
for i = 4, #ARGV do
  if call('ZREM', claim_key(ARGV[2]), ARGV[i]) == 1 then dropped = dropped + drop_unit(ARGV[i], size, ARGV[3]) end
end
return dropped
