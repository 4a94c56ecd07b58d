--- @include keys, tasks, conversations
-- ARGV: tag of a key, then per task: id, fence, what its agent is told.  -> verdict, ...
-- A task that has a mailbox keeps it, and what its agent was told first. Tokens without a mailbox are of a conversation
-- that is gone: they are cut, and the task begins anew under another lease. A finished task has no agent any more.
local answer = {}
for i = 2, #ARGV, 3 do
  local id, mailbox = ARGV[i], mailbox_key(ARGV[i])
  local verdict, state, length, _, _, _, _, teacher = judge(id, ARGV[i + 1], ARGV[1])
  if teacher then verdict = 'STALE' end
  if verdict == 'OK' and call('EXISTS', mailbox) == 1 then
    -- it waits already
  elseif verdict == 'OK' and length > 0 then
    cut(id)
    return_uncharged(id, state)
    verdict = 'STALE'
  elseif verdict == 'OK' then
    call('HSET', mailbox, 'want', ARGV[i + 2], 'calls', 0, 'replies', 0, 'bytes', #ARGV[i + 2])
    want_agent(id)
  end
  answer[#answer + 1] = verdict
end
return answer
