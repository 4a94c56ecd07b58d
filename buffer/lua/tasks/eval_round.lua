--- @include keys
-- ARGV: lineage, step, task, ...  -> {unfinished, failed, done, {record of each task, or false}}
local round = ARGV[1] .. ':' .. ARGV[2]
local results = round_key(round)
return {
  call('SCARD', round_key(round, ':u')), call('SCARD', round_key(round, ':x')), call('HLEN', results),
  #ARGV > 2 and call('HMGET', results, unpack(ARGV, 3)) or {},
}
