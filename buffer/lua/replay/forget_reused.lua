--- @include keys, replay
-- ARGV: lineage, k, group id, ...  -> units forgotten   Kept units that batch k drew and must not train.
local refused = refuse_learner(ARGV[1])
if refused then return refused end
if call('HEXISTS', claim_state_key(ARGV[2]), 'sealed') == 1 then return redis.error_reply('SEALED ' .. ARGV[2]) end
local forgotten = 0
for i = 3, #ARGV do
  if call('ZSCORE', REUSED, ARGV[i]) == ARGV[2] then
    forget_kept(ARGV[i])
    forgotten = forgotten + 1
  end
end
return forgotten
