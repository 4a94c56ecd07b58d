-- ARGV: lineage, k.  -> k   Batch k is trained; its units no longer hold back new ones.
local refused = refuse_learner(ARGV[1])
if refused then return refused end
local version = call('HGET', META, 'version')
if tonumber(ARGV[2]) < tonumber(version) then return redis.error_reply('BACKWARDS ' .. version) end
draw_on_reserve()
call('HSET', META, 'version', ARGV[2])
return tonumber(ARGV[2])
