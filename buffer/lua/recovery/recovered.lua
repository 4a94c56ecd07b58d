--- @include keys
-- ARGV: lineage, run_id that the learner recovered under.  -> ms until leases may be reaped again
-- Refused when yet another server has answered meanwhile: what was put right is lost again.
local refused = refuse_learner(ARGV[1])
if refused then return refused end
local meta = call('HMGET', META, 'seen', 'ttl')
if meta[1] ~= ARGV[2] then return redis.error_reply('RESTARTED ' .. meta[1]) end
local grace = tonumber(meta[2] or '0') -- no lease yet: there is none to wait for
draw_on_reserve()
call('HSET', META, 'gen', ARGV[2], 'state', 'RUNNING', 'grace_until', now_ms() + grace)
return grace
