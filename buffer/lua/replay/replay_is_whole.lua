--- @include keys
-- ARGV: lineage, batches inside the checkpoint, then per batch since: k, units reused, group id, ...  -> 0|1
-- 1 if this store has every use that the learner has: a sealed batch has drawn all it will.
local refused = refuse_learner(ARGV[1])
if refused then return refused end
for k = call('HGET', META, 'committed') + 1, tonumber(ARGV[2]) do
  if call('HEXISTS', claim_state_key(k), 'sealed') == 0 then return 0 end
end
local i = 3
while i <= #ARGV do
  local k, count = ARGV[i], tonumber(ARGV[i + 1])
  if #call('ZRANGEBYSCORE', REUSED, k, k) ~= count then return 0 end
  for j = i + 2, i + 1 + count do
    if call('ZSCORE', REUSED, ARGV[j]) ~= k then return 0 end
  end
  i = i + 2 + count
end
return 1
