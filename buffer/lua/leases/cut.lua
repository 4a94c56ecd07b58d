--- @include tasks
-- ARGV: tag of a key, max attempts, then per task: id, fence.  -> verdict, ...
-- Their chunks are larger than a message, so no actor can be given them: they go, and an attempt is charged.
local answer = {}
for i = 3, #ARGV, 2 do
  local id = ARGV[i]
  local verdict, state = judge(id, ARGV[i + 1], ARGV[1])
  if verdict == 'OK' then
    cut(id)
    take_away(id, state, tonumber(ARGV[2]), 'too large to deliver')
  end
  answer[#answer + 1] = verdict
end
return answer
