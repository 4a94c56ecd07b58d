--- @include keys, tasks
-- ARGV: id.  -> nil | {{id, ms, why, attempts, length}, incarnation, spec, record or nil, {chunk, ...}}
local id = ARGV[1]
local ms = call('ZSCORE', DEAD, id)
if not ms then return false end
local task = call('HMGET', task_key(id), 'inc', 'spec')
local chunks = call('LRANGE', chunks_key(id), 0, -1)
return { dead_letter_row(id, ms), task[1] or '', task[2] or '', call('GET', record_key(id)), chunks }
