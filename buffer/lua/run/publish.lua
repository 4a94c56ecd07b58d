--- @include keys
-- ARGV: lineage, step, field, value, ...  -> 1   Versions of a lineage only go up, each has one digest.
local refused = refuse_learner(ARGV[1])
if refused then return refused end
local key = run .. ':publication'
local known = call('HMGET', key, 'lineage', 'step', 'digest')
if known[1] == ARGV[1] then
  if tonumber(ARGV[2]) < tonumber(known[2]) then return redis.error_reply('BACKWARDS ' .. known[2]) end
  for i = 3, #ARGV, 2 do
    if ARGV[i] == 'digest' and known[2] == ARGV[2] and known[3] ~= ARGV[i + 1] then
      return redis.error_reply('DIGEST ' .. known[2])
    end
  end
end
call('UNLINK', key)
call('HSET', key, 'lineage', ARGV[1], 'step', ARGV[2], unpack(ARGV, 3))
return 1
