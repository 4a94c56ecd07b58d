--- @include keys, tasks, conversations
-- ARGV: tag of a host's key, ttl ms, max attempts, most bytes, then per conversation: id, ticket, stamp of the newest
-- reply that its agent has heard (0: none).  -> {verdict, calls so far, stamp, number and reply, ...}, ...
-- Renews tickets. A reply that an agent has heard and the store has not: the store was set back, and the conversation
-- is lost.
local deadline, room, answer = whole(now_ms() + ARGV[2]), tonumber(ARGV[4]), {}
draw_on_reserve()
for i = 5, #ARGV, 3 do
  local id, heard = ARGV[i], ARGV[i + 2]
  local verdict, calls, _, _, why = judge_ticket(id, ARGV[i + 1], ARGV[1])
  local line = { verdict, calls or 0 }
  if verdict == 'OK' then
    local found = call('ZRANGEBYSCORE', replies_key(id), heard, '+inf', 'WITHSCORES')
    if heard ~= '0' and found[2] ~= heard then
      lose_conversation(id, tonumber(ARGV[3]), 'the store lost a reply that its agent has heard', ARGV[1])
      line = { 'GONE', 0 }
    else
      for at = heard == '0' and 1 or 3, #found, 2 do
        if room <= 0 then break end
        line[#line + 1], line[#line + 2] = found[at + 1], found[at]
        room = room - #found[at]
      end
      if not why then call('ZADD', TICKETS, deadline, id) end
    end
  end
  answer[#answer + 1] = line
end
return answer
