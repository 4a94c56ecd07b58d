--- @include keys, tasks
-- ARGV: ttl ms, max chunks, progress timeout ms (0 = none), max attempts, lines of 'id fence offset tokens',
-- then the chunks of those with tokens.  -> verdict, length, ...
-- Renews leases; `tokens` > 0 also appends a chunk, which counts only where the stored length ends. A
-- heartbeat alone is no life: a lease whose length has stood still for too long is taken away for good.
local now, max_chunks, timeout = now_ms(), tonumber(ARGV[2]), tonumber(ARGV[3])
local deadline, answer = now + tonumber(ARGV[1]), {}
local grace_until = tonumber(call('HGET', META, 'grace_until') or '0')

local function append(id, chunk, length)
  local chunks = chunks_key(id)
  call('HSET', task_key(id), 'len', whole(length), 'progress', whole(now))
  if call('RPUSH', chunks, chunk) >= max_chunks then
    local joined = table.concat(call('LRANGE', chunks, 0, -1))
    call('DEL', chunks)
    call('RPUSH', chunks, joined)
  end
end

local function stands_still(progress)
  return timeout > 0 and now - math.max(tonumber(progress or now), grace_until) > timeout
end

local next_chunk = 6
for id, fence, offset, tokens in string.gmatch(ARGV[5], '(%d+) (%d+) (%d+) (%d+)') do
  local chunk
  offset, tokens = tonumber(offset), tonumber(tokens)
  if tokens > 0 then chunk, next_chunk = ARGV[next_chunk], next_chunk + 1 end
  local verdict, state, length, progress = judge(id, fence)
  local grows = verdict == 'OK' and tokens > 0 and offset == length
  if verdict == 'OK' and not grows and stands_still(progress) then
    verdict = 'STALE'
    call('HDEL', task_key(id), 'fence') -- nor can its holder revive it
    if state == 'L' then charge(id, tonumber(ARGV[4]), 'no progress') end
  elseif verdict == 'OK' then
    if state == 'R' then
      call('ZREM', ready_key(id), id)
      call('HSET', task_key(id), 'st', 'L')
    end
    call('ZADD', lease_key(id), whole(deadline), id)
    if grows then
      length = length + tokens
      append(id, chunk, length)
    elseif tokens > 0 and offset + tokens > length then
      verdict = 'GAP'
    end
  end
  answer[#answer + 1] = verdict
  answer[#answer + 1] = length or 0
end
return answer
