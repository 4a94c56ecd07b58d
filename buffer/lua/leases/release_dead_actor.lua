--- @include keys, tasks
-- ARGV: incarnation, tag of its key, max attempts.  -> ids of the tasks that it held
-- Its process has ended, so its leases are over now, as if they had expired. Another key's leases under the same name,
-- which anybody can take, are not its own.
if call('HGET', META, 'state') ~= 'RUNNING' then return {} end
local function is_its(incarnation, id)
  return incarnation == ARGV[1] and call('HGET', task_key(id), 'key') == ARGV[2]
end
return end_leases('inc', is_its, function(id) charge(id, tonumber(ARGV[3]), 'its actor died') end)
