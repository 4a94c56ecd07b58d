-- ARGV: max attempts, batch.  -> ids whose lease had expired
local now, reaped = now_ms(), {}
for _, leases in ipairs({ run .. ':lease', run .. ':lease:eval' }) do
  for _, id in ipairs(call('ZRANGEBYSCORE', leases, '-inf', now, 'LIMIT', 0, tonumber(ARGV[2]))) do
    -- A member that just died may have ended its unit, and with it the leases of the others.
    if call('ZSCORE', leases, id) then
      charge(id, tonumber(ARGV[1]), 'lease expired', true)
      reaped[#reaped + 1] = id
    end
  end
end
return reaped
