-- ARGV: max attempts, batch.  -> ids whose lease had expired
-- None while the store recovers and for a lease's time after: heartbeats could not arrive before.
local now, reaped = now_ms(), {}
local meta = call('HMGET', META, 'state', 'grace_until')
if meta[1] == 'RECOVERING' or now < tonumber(meta[2] or '0') then return reaped end
for _, leases in ipairs({ run .. ':lease', run .. ':lease:eval' }) do
  for _, id in ipairs(call('ZRANGEBYSCORE', leases, '-inf', now, 'LIMIT', 0, tonumber(ARGV[2]))) do
    -- A member that just died may have ended its unit, and with it the leases of the others.
    if call('ZSCORE', leases, id) then
      charge(id, tonumber(ARGV[1]), 'lease expired')
      reaped[#reaped + 1] = id
    end
  end
end
return reaped
