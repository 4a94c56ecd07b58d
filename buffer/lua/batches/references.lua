--- @include keys
-- ARGV: most bytes, task id, ...  -> record of each task, '' if it has none or a longer one
local answer = {}
for i = 2, #ARGV do
  local key = record_key(ARGV[i])
  answer[i - 1] = call('STRLEN', key) <= tonumber(ARGV[1]) and call('GET', key) or ''
end
return answer
