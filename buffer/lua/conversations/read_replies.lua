--- @include keys, tasks, conversations
-- ARGV: tag of a host's key, ttl ms, most ms of an agent, max attempts, most bytes, then per conversation: id, ticket,
-- stamp of the newest reply that its agent has heard (0: none).
-- -> {verdict, calls so far, stamp, number and reply, ...}, ...
-- Renews tickets. A conversation is lost whose agent has heard a reply that the store has not, because it was set back,
-- and one that has lasted for longer than its host lets an agent run. The latter is counted from the end of a recovery.
local now, room, answer = now_ms(), tonumber(ARGV[5]), {}
local deadline = whole(now + ARGV[2])
local grace_until = tonumber(call('HGET', META, 'grace_until') or '0')
draw_on_reserve()

-- Why a conversation is lost; nil = it is not.
local function why_lost(id, ticket, heard, has_ended)
  if has_lost(id, heard) then return LOST_REPLY end
  if not has_ended and now - math.max(ticket / 1000, grace_until) > tonumber(ARGV[3]) then -- a ticket is a time in microseconds
    return 'its agent did not end in time'
  end
end

local function read(id, last, line)
  while room > 0 do
    local found = call('ZRANGEBYSCORE', replies_key(id), '(' .. last, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
    if #found == 0 then return end
    line[#line + 1], line[#line + 2] = found[2], found[1]
    room, last = room - #found[1] - PART_BYTES, found[2]
  end
end

local renewed = {}
for i = 6, #ARGV, 3 do
  local id, ticket, heard = unpack(ARGV, i, i + 2)
  local verdict, calls, _, _, why, newest = judge_ticket(id, ticket, ARGV[1])
  local line = { verdict, calls or 0 }
  local has_news = (newest or '0') ~= heard
  local lost = verdict == 'OK' and why_lost(id, ticket, has_news and heard or '0', why)
  if lost then
    note_silence(id)
    lose_conversation(id, tonumber(ARGV[4]), lost, ARGV[1])
    line = { 'GONE', 0 }
  elseif verdict == 'OK' then
    if has_news then read(id, heard, line) end
    if not why then
      renewed[#renewed + 1] = deadline
      renewed[#renewed + 1] = id
    end
  end
  answer[#answer + 1] = line
end
if #renewed > 0 then call('ZADD', TICKETS, unpack(renewed)) end
return answer
