--- @include keys, tasks
-- ARGV: tag of a key or a holder, reason, ms of the first time, most ms.  -> ids of the tasks that it held
-- The key gets no leases, each time for twice as long; what it holds goes to others, and costs them nothing. It
-- begins anew an hour after its last suspension ended.
local known, now = call('HGET', SUSPENDED, ARGV[1]) or '0 0', now_ms()
local ends_at, times = string.match(known, '^(%d+) (%d+)')
times = now > ends_at + 3600000 and 0 or tonumber(times)
local until_ms = now + math.min(ARGV[3] * 2 ^ times, tonumber(ARGV[4]))
draw_on_reserve()
call('HSET', SUSPENDED, ARGV[1], whole(until_ms) .. ' ' .. whole(times + 1) .. ' ' .. ARGV[2])
local function is_its(key) return key and (key == ARGV[1] or holder_of(key) == ARGV[1]) end
return end_leases('key', is_its, give_back)
