--- @include keys
-- ARGV: address of the broker, its figures, seconds to remember them  -> 1
-- The hash is as small as the number of addresses; it goes when no broker has served for long.
local key = run .. ':brokers'
draw_on_reserve()
call('HSET', key, ARGV[1], ARGV[2])
call('EXPIRE', key, ARGV[3])
return 1
