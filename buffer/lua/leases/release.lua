--- @include tasks
-- ARGV: tag of a key, then per task: id, fence.  -> verdict, ...   Gives leases back; no attempt is charged.
local answer = {}
for i = 2, #ARGV, 2 do
  local verdict, state = judge(ARGV[i], ARGV[i + 1], ARGV[1])
  if verdict == 'OK' and state == 'L' then give_back(ARGV[i]) end
  answer[#answer + 1] = verdict
end
return answer
