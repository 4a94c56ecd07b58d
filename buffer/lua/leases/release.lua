--- @include tasks
-- ARGV: tag of a key, then per task: id, fence.  -> verdict, ...   Gives leases back; no attempt is charged.
-- Without their fences, so that no heartbeat on its way revives one: STALE where that was done before.
local answer = {}
for i = 2, #ARGV, 2 do
  local verdict, state = judge(ARGV[i], ARGV[i + 1], ARGV[1])
  if verdict == 'OK' then return_uncharged(ARGV[i], state) end
  answer[#answer + 1] = verdict
end
return answer
