--- @include tasks
-- ARGV: tag of a key, max attempts, then per task: id, fence.  -> verdict, ...
-- They are larger than a message, so no actor can be given them. Their chunks go, which costs the task nothing: whoever
-- was given them has not made them. Without any the task itself is too large, and an attempt is charged.
local answer = {}
for i = 3, #ARGV, 2 do
  local id = ARGV[i]
  local verdict, state, length = judge(id, ARGV[i + 1], ARGV[1])
  if verdict == 'OK' and length > 0 then
    cut(id)
    return_uncharged(id, state)
  elseif verdict == 'OK' then
    take_away(id, state, tonumber(ARGV[2]), 'too large to deliver')
  end
  answer[#answer + 1] = verdict
end
return answer
