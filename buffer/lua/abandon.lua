-- ARGV: lineage, k, reason, most tasks to move in one call.  -> {tasks dropped, 1 if there are more}
-- Gives up a batch that cannot be trained, sealed or not; emptied, it may be claimed anew.
local refused = refuse_learner(ARGV[1])
if refused then return refused end
local k, version = ARGV[2], call('HGET', META, 'version')
if tonumber(k) <= tonumber(version) then return redis.error_reply('TRAINED ' .. version) end
local size, dropped = group_size(), 0
for _, gid in ipairs(call('ZRANGE', claim_key(k), 0, units_of(ARGV[4], size) - 1)) do
  call('ZREM', claim_key(k), gid)
  dropped = dropped + drop_unit(gid, size, ARGV[3])
end
if call('EXISTS', claim_key(k)) == 1 then return { dropped, 1 } end
call('UNLINK', claim_state_key(k))
call('ZREM', CLAIMS, k)
return { dropped, 0 }
