--- @include keys
-- ARGV: seconds to remember them, then per actor: incarnation, number of fields, field, value, ...  -> 1
local now, i = now_ms(), 2
draw_on_reserve()
while i < #ARGV do
  local key, last = run .. ':a:' .. ARGV[i], i + 1 + 2 * ARGV[i + 1]
  call('ZADD', run .. ':actors', now, ARGV[i])
  if last > i + 1 then call('HSET', key, unpack(ARGV, i + 2, last)) end
  call('EXPIRE', key, ARGV[1])
  i = last + 1
end
call('ZREMRANGEBYSCORE', run .. ':actors', '-inf', now - ARGV[1] * 1000)
return 1
