-- ARGV: ttl ms, max chunks, then per task: id, fence, offset, tokens, chunk.  -> verdict, length, ...
-- Renews leases; `tokens` > 0 also appends a chunk, which counts only where the stored length ends.
local deadline, max_chunks = now_ms() + tonumber(ARGV[1]), tonumber(ARGV[2])
local answer = {}
for i = 3, #ARGV, 5 do
  local id, offset, tokens = ARGV[i], tonumber(ARGV[i + 2]), tonumber(ARGV[i + 3])
  local verdict, state, length = judge(id, ARGV[i + 1])
  if verdict == 'OK' then
    if state == 'R' then
      call('ZREM', ready_key(id), id)
      call('HSET', task_key(id), 'st', 'L')
    end
    call('ZADD', lease_key(id), deadline, id)
    if tokens > 0 and offset == length then
      local chunks = chunks_key(id)
      length = length + tokens
      call('HSET', task_key(id), 'len', length)
      if call('RPUSH', chunks, ARGV[i + 4]) >= max_chunks then
        local joined = table.concat(call('LRANGE', chunks, 0, -1))
        call('DEL', chunks)
        call('RPUSH', chunks, joined)
      end
    elseif tokens > 0 and offset + tokens > length then
      verdict = 'GAP'
    end
  end
  answer[#answer + 1] = verdict
  answer[#answer + 1] = length or 0
end
return answer
