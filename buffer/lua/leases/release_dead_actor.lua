--- @include keys, tasks
-- ARGV: incarnation, max attempts.  -> ids of the tasks that it held
-- Its process has ended, so its leases are over now, as if they had expired.
if call('HGET', META, 'state') ~= 'RUNNING' then return {} end
local function is_its(incarnation) return incarnation == ARGV[1] end
return end_leases('inc', is_its, function(id) charge(id, tonumber(ARGV[2]), 'its actor died') end)
