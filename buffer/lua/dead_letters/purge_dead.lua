--- @include keys, units
-- ARGV: id, ...  -> verdict, ...   Of a purged dead letter one bit is left; it still counts as dead.
local answer = {}
for i, id in ipairs(ARGV) do
  if call('ZREM', DEAD, id) == 1 then
    forget({ id }, PURGED)
    answer[i] = 'PURGED'
  else
    answer[i] = 'GONE'
  end
end
return answer
