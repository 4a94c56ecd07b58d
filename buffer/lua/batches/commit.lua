--- @include keys, units, replay
-- ARGV: lineage, k, most tasks to move in one call.  -> {tasks committed, 1 if there are more}
-- Every batch up to k is inside a durable checkpoint. Of a committed task one bit remains,
-- and its record where its unit is kept for reuse.
local refused = refuse_learner(ARGV[1])
if refused then return refused end
local meta = call('HMGET', META, 'version', 'committed')
if tonumber(ARGV[2]) > tonumber(meta[1]) then return redis.error_reply('UNTRAINED ' .. meta[1]) end
local claims = call('ZRANGEBYSCORE', CLAIMS, '-inf', ARGV[2])
for _, k in ipairs(claims) do
  if call('HEXISTS', claim_state_key(k), 'sealed') == 0 and call('EXISTS', claim_key(k)) == 1 then
    return redis.error_reply('UNSEALED ' .. k)
  end
end
local size, committed = group_size(), 0
local room = units_of(ARGV[3], size)
draw_on_reserve()
for _, k in ipairs(claims) do
  local units = room > 0 and call('ZRANGE', claim_key(k), 0, room - 1) or {}
  for _, gid in ipairs(units) do
    call('ZREM', claim_key(k), gid)
    local rating, trained = rating_of(k, gid), among(CLAIMED, members(gid, size))
    if #trained > 0 then call('SREM', CLAIMED, unpack(trained)) end
    if rating then
      leave_bits(trained, COMMITTED)
      keep_unit(gid, trained, rating)
    else
      forget(trained, COMMITTED)
    end
    committed = committed + #trained
  end
  room = room - #units
  if call('EXISTS', claim_key(k)) == 0 then
    call('UNLINK', claim_state_key(k))
    call('ZREM', CLAIMS, k)
  end
end
for _, gid in ipairs(call('ZRANGEBYSCORE', REUSED, '-inf', ARGV[2], 'LIMIT', 0, math.max(room, 0))) do
  give_kept_back(gid, 1)
end
local more = #call('ZRANGEBYSCORE', CLAIMS, '-inf', ARGV[2])
  + #call('ZRANGEBYSCORE', REUSED, '-inf', ARGV[2], 'LIMIT', 0, 1)
if more == 0 then call('HSET', META, 'committed', math.max(tonumber(ARGV[2]), tonumber(meta[2]))) end
return { committed, more > 0 and 1 or 0 }
