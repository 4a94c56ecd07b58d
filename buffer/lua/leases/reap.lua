--- @include keys, tasks, conversations
-- ARGV: max attempts, batch, pause between reaps ms.  -> ids whose lease had expired
-- Tickets of hosts expire likewise. A conversation without a call is taken by another host; one with calls is lost.
-- None while the store recovers and for a lease's time after: heartbeats could not arrive before.
-- The same where no reap has come for long, or the clock jumped: the server was stopped, or cut off.
local now, reaped = now_ms(), {}
local meta = call('HMGET', META, 'state', 'grace_until', 'reaped_at', 'ttl')
if not meta[1] then return reaped end -- a wiped store: not even a time is written before the run is
local ttl = tonumber(meta[4] or '0') -- no lease yet: there is none to wait for
local gap = now - tonumber(meta[3] or now)
draw_on_reserve()
call('HSET', META, 'reaped_at', whole(now))
if gap < 0 or gap > math.max(ttl / 2, 3 * tonumber(ARGV[3])) then
  meta[2] = now + ttl
  call('HSET', META, 'grace_until', whole(meta[2]))
  for _, leases in ipairs({ LEASES, SCORE_LEASES, EVAL_LEASES, TICKETS }) do -- of a clock that ran ahead
    for _, id in ipairs(call('ZRANGEBYSCORE', leases, '(' .. meta[2], '+inf')) do
      call('ZADD', leases, meta[2], id)
    end
  end
end
if meta[1] == 'RECOVERING' or now < tonumber(meta[2] or '0') then return reaped end
for _, leases in ipairs({ LEASES, SCORE_LEASES, EVAL_LEASES }) do
  for _, id in ipairs(call('ZRANGEBYSCORE', leases, '-inf', now, 'LIMIT', 0, tonumber(ARGV[2]))) do
    -- A member that just died may have ended its unit, and with it the leases of the others.
    if call('ZSCORE', leases, id) then
      charge(id, tonumber(ARGV[1]), 'lease expired')
      reaped[#reaped + 1] = id
    end
  end
end

for _, id in ipairs(call('ZRANGEBYSCORE', TICKETS, '-inf', now, 'LIMIT', 0, tonumber(ARGV[2]))) do
  local box, state = call('HMGET', mailbox_key(id), 'calls', 'key'), call('HGET', task_key(id), 'st')
  call('ZREM', TICKETS, id)
  if box[1] == '0' and (state == 'R' or state == 'L') then
    note_silence(id)
    call('HDEL', mailbox_key(id), 'ticket', 'host', 'key')
    want_agent(id)
  elseif box[1] then
    lose_conversation(id, tonumber(ARGV[1]), 'its host died', box[2])
  end
end
return reaped
