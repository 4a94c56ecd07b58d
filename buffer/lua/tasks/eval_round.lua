--- @include keys
-- ARGV: lineage, step.  -> {unfinished, failed, {id, record, ...}}
local round = ARGV[1] .. ':' .. ARGV[2]
return {
  call('SCARD', round_key(round, ':u')), call('SCARD', round_key(round, ':x')),
  call('HGETALL', round_key(round)),
}
