--- @include keys, conversations
-- ARGV: tag of a host's key, then per conversation: id, ticket, why ('': it goes on), number of a call (0: the whole),
-- its reward ('': none).  -> verdict, ...   The last reward before the end counts; DUP: the conversation has ended.
local answer = {}
draw_on_reserve()
for i = 2, #ARGV, 5 do
  local id, ticket, why, number, reward = unpack(ARGV, i, i + 4)
  local verdict, calls, _, _, ended = judge_ticket(id, ticket, ARGV[1])
  if verdict == 'OK' and ended then
    verdict = 'DUP'
  elseif verdict == 'OK' and tonumber(number) > calls then
    verdict = 'GAP'
  elseif verdict == 'OK' then
    if reward ~= '' then call('HSET', mailbox_key(id), 'reward:' .. number, reward) end
    if why ~= '' then
      call('HSET', mailbox_key(id), 'why', why, 'opened', whole(now_ms()))
      call('ZREM', TICKETS, id)
      note_news(id)
    end
  end
  answer[#answer + 1] = verdict
end
return answer
