--- @include keys, units, replay
-- ARGV: lineage, k, reason, most tasks to move in one call, to dead letters (0|1).  -> {tasks, 1 if there are more}
-- Gives up a batch that cannot be trained, sealed or not; emptied, it may be claimed again. Its units are
-- dropped, or its tasks become dead letters with their records. What it reused is kept for others,
-- or forgotten.
local refused = refuse_learner(ARGV[1])
if refused then return refused end
local k, version = ARGV[2], call('HGET', META, 'version')
if tonumber(k) <= tonumber(version) then return redis.error_reply('TRAINED ' .. version) end
local size, moved = group_size(), 0
for _, gid in ipairs(call('ZRANGE', claim_key(k), 0, units_of(ARGV[4], size) - 1)) do
  call('ZREM', claim_key(k), gid)
  if ARGV[5] == '1' then
    moved = moved + unit_to_dead_letters(gid, size, ARGV[3])
  else
    moved = moved + drop_unit(gid, size, ARGV[3])
  end
end
if call('EXISTS', claim_key(k)) == 1 then return { moved, 1 } end
for _, gid in ipairs(call('ZRANGEBYSCORE', REUSED, k, k)) do
  if ARGV[5] == '1' then forget_kept(gid) else give_kept_back(gid, 0) end
end
call('UNLINK', claim_state_key(k))
call('ZREM', CLAIMS, k)
return { moved, 0 }
