--- @include keys
-- -> {incarnation, ms since it was last seen, {field, value, ...}}, ...
local now, answer = now_ms(), {}
local seen = call('ZRANGE', run .. ':actors', 0, -1, 'WITHSCORES')
for i = 1, #seen, 2 do
  answer[#answer + 1] = { seen[i], now - tonumber(seen[i + 1]), call('HGETALL', run .. ':a:' .. seen[i]) }
end
return answer
