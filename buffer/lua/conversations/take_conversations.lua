--- @include keys, conversations
-- ARGV: incarnation of a host, tag of its key, n, ttl ms, most bytes, newest ticket that the host knows (0: none).
-- -> {'OK', ticket, {id, spec, what its agent is told}, ...} | {'RESTS', silent agents, ms} | {'WAIT'} | {'EMPTY'} |
-- {'DONE'}
-- A ticket whose answer was lost is given once more. A host whose agents end without a call gets one conversation at a
-- time, and none in between for a pause that doubles with each of them, up to a minute: it would attract all others.
local MOST_SILENT, FIRST_MS, LONGEST_MS = 3, 1000, 60000
local meta = call('HMGET', META, 'state', 'fence')
if meta[1] == 'ENDED' then return { 'DONE' } end
if meta[1] ~= 'RUNNING' then return { 'WAIT' } end
draw_on_reserve()
local now, host, room = now_ms(), host_key(ARGV[1], ARGV[2]), tonumber(ARGV[5])
local known = call('HMGET', host, 'ticket', 'ids', 'silent', 'rests_until')
local answer, deadline = {}, whole(now + ARGV[4])

local function give(id)
  local spec, want = call('HGET', task_key(id), 'spec') or '', call('HGET', mailbox_key(id), 'want')
  call('ZADD', TICKETS, deadline, id)
  answer[#answer + 1] = { id, spec, want }
  room = room - #spec - #want
end

if known[1] and tonumber(known[1]) > tonumber(ARGV[6]) then
  for id in string.gmatch(known[2], '%d+') do
    local box = call('HMGET', mailbox_key(id), 'ticket', 'calls', 'why')
    if box[1] == known[1] and box[2] == '0' and not box[3] then give(id) end
  end
  if #answer > 0 then return { 'OK', known[1], unpack(answer) } end
end

local n, silent = tonumber(ARGV[3]), tonumber(known[3] or '0')
local waiting = call('ZRANGE', WANTED, 0, n - 1)
if #waiting == 0 then return { 'EMPTY' } end
if silent >= MOST_SILENT then
  local left = tonumber(known[4] or '0') - now
  if left > 0 and left <= LONGEST_MS then return { 'RESTS', silent, left } end
  n = 1
end
local ticket, ids = later_than(meta[2]), {}
call('HSET', META, 'fence', ticket)
for i = 1, math.min(n, #waiting) do
  if room <= 0 then break end
  local id = waiting[i]
  ids[i] = id
  call('ZREM', WANTED, id)
  call('HSET', mailbox_key(id), 'ticket', ticket, 'host', ARGV[1], 'key', ARGV[2])
  give(id)
end
call('HSET', host, 'ticket', ticket, 'ids', table.concat(ids, ' '))
if silent >= MOST_SILENT then
  call('HSET', host, 'rests_until', whole(now + math.min(FIRST_MS * 2 ^ (silent - MOST_SILENT), LONGEST_MS)))
end
call('EXPIRE', host, 3600)
return { 'OK', ticket, unpack(answer) }
