-- ARGV: incarnation, seconds to remember it, field, value, ...  -> 1
local key = run .. ':a:' .. ARGV[1]
draw_on_reserve()
call('ZADD', run .. ':actors', now_ms(), ARGV[1])
if #ARGV > 2 then call('HSET', key, unpack(ARGV, 3)) end
call('EXPIRE', key, ARGV[2])
call('ZREMRANGEBYSCORE', run .. ':actors', '-inf', now_ms() - ARGV[2] * 1000)
return 1
