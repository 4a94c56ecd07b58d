--- @include keys, conversations
-- ARGV: incarnation of a host, tag of its key, n, ttl ms.
-- -> {'OK', ticket, {id, spec, what its agent is told}, ...} | {'WAIT'} | {'EMPTY'} | {'DONE'}
-- A ticket whose answer was lost expires before a call is made under it; another host takes the conversation then.
local meta = call('HMGET', META, 'state', 'fence')
if meta[1] == 'ENDED' then return { 'DONE' } end
if meta[1] ~= 'RUNNING' then return { 'WAIT' } end
local ids = call('ZRANGE', WANTED, 0, ARGV[3] - 1)
if #ids == 0 then return { 'EMPTY' } end
call('ZREM', WANTED, unpack(ids))
local ticket, deadline = later_than(meta[2]), whole(now_ms() + ARGV[4])
call('HSET', META, 'fence', ticket)
local answer = { 'OK', ticket }
for i, id in ipairs(ids) do
  call('HSET', mailbox_key(id), 'ticket', ticket, 'host', ARGV[1], 'key', ARGV[2])
  call('ZADD', TICKETS, deadline, id)
  answer[i + 2] = { id, call('HGET', task_key(id), 'spec') or '', call('HGET', mailbox_key(id), 'want') }
end
return answer
