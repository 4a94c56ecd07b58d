--- @include keys, tasks
-- ARGV: tag of a key or a holder, reason, ms of the first time, most ms.  -> ids of the tasks that it held
-- The key gets no leases, each time for twice as long, unless that is more than the most; then it does not count as
-- a time. None ends before one that it follows. What the key holds goes to others, and costs them nothing. An hour
-- after it ended a suspension is forgotten.
local known, times, ends, now = call('HGETALL', SUSPENDED), 0, 0, now_ms()
draw_on_reserve()
for i = 1, #known, 2 do
  local ends_at, count = string.match(known[i + 1], '^(%d+) (%d+)')
  if now > ends_at + 3600000 then
    call('HDEL', SUSPENDED, known[i])
  elseif known[i] == ARGV[1] then
    times, ends = tonumber(count), tonumber(ends_at)
  end
end
local first, most = tonumber(ARGV[3]), tonumber(ARGV[4])
local until_ms = math.max(ends, now + math.min(first * 2 ^ times, most))
if first < most then times = times + 1 end
call('HSET', SUSPENDED, ARGV[1], whole(until_ms) .. ' ' .. whole(times) .. ' ' .. ARGV[2])
local function is_its(key) return key and (key == ARGV[1] or holder_of(key) == ARGV[1]) end
return end_leases('key', is_its, give_back)
