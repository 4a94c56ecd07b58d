--- @include keys
-- -> {why leasing is paused or '', {tag of a suspended key, ms left, reason}, ...}
local now, answer = now_ms(), { call('HGET', META, 'paused') or '' }
local known = call('HGETALL', SUSPENDED)
for i = 1, #known, 2 do
  local ends_at, reason = string.match(known[i + 1], '^(%d+) %d+ (.*)$')
  if tonumber(ends_at) > now then answer[#answer + 1] = { known[i], ends_at - now, reason } end
end
return answer
