--- @include beats
-- ARGV: ttl ms, max chunks, progress timeout ms (0 = none), max attempts, most bytes of a task's chunks, longest
-- lease ms (0 = no limit), lines of 'id fence offset tokens oldest-version first-fence last-fence key', then the
-- chunks of those with tokens.
-- -> verdict, length, ...
-- Renews leases; `tokens` > 0 also appends a chunk (`renew` in beats.lua has the rules).
local answer, next_chunk = {}, 8
local line = '(%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) ([^\n]*)'
for id, fence, offset, tokens, oldest, first_fence, last_fence, key in string.gmatch(ARGV[7], line) do
  local chunk
  offset, tokens = tonumber(offset), tonumber(tokens)
  if tokens > 0 then chunk, next_chunk = ARGV[next_chunk], next_chunk + 1 end
  local verdict, length = renew(id, fence, offset, tokens, chunk, oldest, first_fence, last_fence, key)
  answer[#answer + 1] = verdict
  answer[#answer + 1] = length
end
return answer
