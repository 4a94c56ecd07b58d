-- ARGV: task id, ...  -> record or nil, ...
local keys = {}
for i, id in ipairs(ARGV) do keys[i] = record_key(id) end
return call('MGET', unpack(keys))
