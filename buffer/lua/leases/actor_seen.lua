--- @include keys
-- ARGV: seconds to remember them, then per actor: incarnation, number of fields, field, value, ...  -> 1
local now, i = now_ms(), 2
draw_on_reserve()
while i < #ARGV do
  local key, last = run .. ':a:' .. ARGV[i], i + 1 + 2 * ARGV[i + 1]
  call('ZADD', run .. ':actors', now, ARGV[i])
  call('UNLINK', key) -- names of an earlier report would stay
  for first = i + 2, last, 100 do -- Lua cannot unpack thousands
    call('HSET', key, unpack(ARGV, first, math.min(first + 99, last)))
  end
  call('EXPIRE', key, ARGV[1])
  i = last + 1
end
call('ZREMRANGEBYSCORE', run .. ':actors', '-inf', now - ARGV[1] * 1000)
return 1
