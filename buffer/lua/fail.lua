-- ARGV: max attempts, then per task: id, fence, kind, reason.  -> verdict, ...
-- Kind `data`: every failure counts. Otherwise the machine failed: only attempts without progress count.
local answer = {}
for i = 2, #ARGV, 4 do
  local id = ARGV[i]
  local verdict = judge(id, ARGV[i + 1])
  if verdict == 'OK' then charge(id, tonumber(ARGV[1]), ARGV[i + 3], ARGV[i + 2] ~= 'data') end
  answer[#answer + 1] = verdict
end
return answer
