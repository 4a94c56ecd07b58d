--- @include keys
-- ARGV: lineage, k.  -> k   Batch k is trained; its units no longer hold back new ones.
local refused = refuse_learner(ARGV[1])
if refused then return refused end
local version = call('HGET', META, 'version')
if tonumber(ARGV[2]) < tonumber(version) then return redis.error_reply('BACKWARDS ' .. version) end
draw_on_reserve()
call('HSET', META, 'version', ARGV[2])
-- A batch that was trained does not kill its learner, even if the life ends before a checkpoint.
for _, k in ipairs(call('ZRANGEBYSCORE', CLAIMS, '-inf', ARGV[2])) do
  call('HDEL', claim_state_key(k), 'starts')
end
return tonumber(ARGV[2])
