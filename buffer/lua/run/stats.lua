--- @include keys, conversations
-- -> {meta fields}, {name, count, ...}, {reason, count, ...}, {k, units, sealed, starts, ...}, {ready, leased, done,
-- failed evaluations}, {teacher, finished tasks that wait for it, ...}
-- Counts come from the sets and bitmaps themselves; there is no counter that could drift.
local size = tonumber(call('HGET', META, 'group_size') or '1')
local oldest = call('ZRANGE', WANTED, 0, 0, 'WITHSCORES')[2]
local by_host, hosts, held = {}, 0, call('ZRANGE', TICKETS, 0, -1)
for _, id in ipairs(held) do
  local box = call('HMGET', mailbox_key(id), 'host', 'key')
  local host = host_key(box[1] or '', box[2] or '')
  if not by_host[host] then by_host[host], hosts = true, hosts + 1 end
end
local counts = {
  'created', call('BITCOUNT', KNOWN),
  'ready', call('ZCARD', READY) + call('ZCARD', NEW) * size,
  'leased', call('ZCARD', LEASES),
  'scoring', call('ZCARD', SCORE_LEASES),
  'buffered', call('SCARD', DONE),
  'claimed', call('SCARD', CLAIMED),
  'committed', call('BITCOUNT', COMMITTED),
  'dead', call('ZCARD', DEAD) + call('BITCOUNT', PURGED),
  'purged', call('BITCOUNT', PURGED),
  'cancelled', call('BITCOUNT', CANCELLED),
  'new_units', call('ZCARD', NEW),
  'open_units', call('SCARD', OPEN),
  'buffered_units', call('ZCARD', BUF),
  'kept_units', call('ZCARD', REPLAY),
  'reused_units', call('ZCARD', REUSED),
  'wanted', call('ZCARD', WANTED),
  'wanted_ms', oldest and math.max(0, now_ms() - oldest) or 0,
  'hosted', #held,
  'hosts', hosts,
}
local reasons = {}
for _, reason in ipairs(call('SMEMBERS', REASONS)) do
  reasons[#reasons + 1] = reason
  reasons[#reasons + 1] = call('BITCOUNT', dropped_key(reason))
end
local claims = {}
for _, k in ipairs(call('ZRANGE', CLAIMS, 0, -1)) do
  claims[#claims + 1] = {
    tonumber(k), call('ZCARD', claim_key(k)), call('HEXISTS', claim_state_key(k), 'sealed'),
    tonumber(call('HGET', claim_state_key(k), 'starts') or '0'),
  }
end
local ready, unfinished, done, failed = 0, 0, 0, 0
for _, round in ipairs(call('ZRANGE', ROUNDS, 0, -1)) do
  ready = ready + call('ZCARD', round_key(round, ':r'))
  unfinished = unfinished + call('SCARD', round_key(round, ':u'))
  done = done + call('HLEN', round_key(round))
  failed = failed + call('SCARD', round_key(round, ':x'))
end
local eval = { ready, unfinished - ready, done, failed }
local unscored = {}
for _, teacher in ipairs(call('SMEMBERS', TEACHERS)) do
  unscored[#unscored + 1] = teacher
  unscored[#unscored + 1] = call('ZCARD', unscored_key(teacher))
end
return { call('HGETALL', META), counts, reasons, claims, eval, unscored }
