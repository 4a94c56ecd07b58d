--- @include keys, conversations
-- ARGV: tag of a host's key, most calls, most open calls, most bytes of a mailbox and of a body, then per call: id,
-- ticket, number, parent, keep, tail.  -> verdict, calls so far, ...
-- Calls are numbered from 1. The body of one is the first `keep` bytes of its parent's body (0: of nothing), and tail.
-- DUP: it is stored. OTHER: another one is stored under its number, or its parent's body is shorter. GAP: one before it
-- is missing. BUSY: too many calls are open. FULL: nothing more fits. ENDED: the conversation has.
local most_calls, most_open, most_bytes = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])

local function why_not(id, number, parent, keep, tail, calls, replies, bytes, why)
  local size = parent == '0' and 0 or tonumber(call('HGET', mailbox_key(id), 'size:' .. parent) or '-1')
  if number > calls + 1 then return 'GAP' end
  if why then return 'ENDED' end
  if calls - replies >= most_open then return 'BUSY' end
  if calls >= most_calls or bytes + #tail > most_bytes or keep + #tail > most_bytes then return 'FULL' end
  if keep > size then return 'OTHER' end
end

local function append(id, number, line, calls, replies, bytes, tail, size)
  local mailbox = mailbox_key(id)
  if number == '1' then
    local box = call('HMGET', mailbox, 'host', 'key')
    call('HDEL', host_key(box[1], box[2]), 'silent', 'rests_until')
  end
  call('RPUSH', calls_key(id), line)
  call('HSET', mailbox, 'calls', number, 'bytes', bytes + #tail, 'size:' .. number, size)
  if calls == replies then call('HSET', mailbox, 'opened', whole(now_ms())) end
  note_news(id)
end

local answer = {}
for i = 5, #ARGV, 6 do
  local id, ticket, number, parent, keep, tail = unpack(ARGV, i, i + 5)
  local verdict, calls, replies, bytes, why = judge_ticket(id, ticket, ARGV[1])
  if verdict == 'OK' then
    local line, at = parent .. ' ' .. keep .. '\n' .. tail, tonumber(number)
    if at <= calls then
      verdict = call('LRANGE', calls_key(id), at - 1, at - 1)[1] == line and 'DUP' or 'OTHER'
    else
      verdict = why_not(id, at, parent, tonumber(keep), tail, calls, replies, bytes, why) or 'OK'
    end
    if verdict == 'OK' then
      append(id, number, line, calls, replies, bytes, tail, keep + #tail)
      calls = at
    end
  end
  answer[#answer + 1] = verdict
  answer[#answer + 1] = calls or 0
end
return answer
