--- @include keys
-- ARGV: field, value, ...   Sets meta of a new run; of a known run it only compares.
-- -> {} | {field, stored value} of the first that differs
if call('EXISTS', META) == 1 then
  for i = 1, #ARGV, 2 do
    local stored = call('HGET', META, ARGV[i])
    if not stored and ARGV[i] == 'vocabulary' then
      stored = ARGV[i + 1]
      call('HSET', META, ARGV[i], stored)
    end
    if stored ~= ARGV[i + 1] then return { ARGV[i], stored or '' } end
  end
  return {}
end
local server = string.match(call('INFO', 'server'), 'run_id:(%x+)')
call('HSET', META, 'state', 'RUNNING', 'lineage', 0, 'version', 0, 'committed', 0, 'fence', 0,
  'gen', server, 'seen', server, unpack(ARGV))
return {}
