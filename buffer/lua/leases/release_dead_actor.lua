--- @include keys, tasks
-- ARGV: incarnation, max attempts.  -> ids of the tasks that it held
-- Its process has ended, so its leases are over now, as if they had expired; under a newer fence, so that a
-- message of it that is still on the way revives none of them.
local orphans = {}
if call('HGET', META, 'state') ~= 'RUNNING' then return orphans end
for _, leases in ipairs({ LEASES, EVAL_LEASES }) do
  for _, id in ipairs(call('ZRANGE', leases, 0, -1)) do
    -- A member that just died may have ended its unit, and with it the leases of the others.
    if call('HGET', task_key(id), 'inc') == ARGV[1] and call('ZSCORE', leases, id) then
      call('HINCRBY', task_key(id), 'fence', 1)
      charge(id, tonumber(ARGV[2]), 'its actor died')
      orphans[#orphans + 1] = id
    end
  end
end
return orphans
