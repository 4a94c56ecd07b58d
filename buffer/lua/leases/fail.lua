--- @include keys, tasks, conversations
-- ARGV: tag of a key, max attempts, max data failures, then per task: id, fence, kind, reason.  -> verdict, ...
-- Kind `data`: every failure counts. Otherwise the machine failed: only attempts without progress count. DUP: the lease
-- had expired, and was charged then. It ends without its fence, so that no heartbeat on its way revives it: STALE where
-- that was done before. After an agent has ended, the task begins anew, with another agent.
local answer = {}
for i = 4, #ARGV, 4 do
  local id, reason = ARGV[i], ARGV[i + 3]
  local verdict, state = judge(id, ARGV[i + 1], ARGV[1])
  if verdict == 'OK' then call('HDEL', task_key(id), 'fence') end
  if verdict == 'OK' and state ~= 'L' then
    verdict = 'DUP'
  elseif verdict == 'OK' then
    local has_ended = call('HEXISTS', mailbox_key(id), 'why') == 1
    if ARGV[i + 2] == 'data' then
      if has_ended then cut(id) end
      charge_data(id, tonumber(ARGV[3]), reason)
    elseif has_ended then
      lose_conversation(id, tonumber(ARGV[2]), reason, ARGV[1])
    else
      charge(id, tonumber(ARGV[2]), reason)
    end
  end
  answer[#answer + 1] = verdict
end
return answer
