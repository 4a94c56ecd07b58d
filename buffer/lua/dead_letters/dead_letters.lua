--- @include keys, tasks
-- ARGV: offset, count.  -> {id, ms, why, attempts, length}, ...   Dead letters, the oldest first.
local answer = {}
local found = call('ZRANGE', DEAD, ARGV[1], ARGV[1] + ARGV[2] - 1, 'WITHSCORES')
for i = 1, #found, 2 do answer[#answer + 1] = dead_letter_row(found[i], found[i + 1]) end
return answer
