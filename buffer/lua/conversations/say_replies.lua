--- @include keys, tasks, conversations, beats
-- ARGV: as of beat, in each line before the key the ticket that its actor knows, the number of a call, and the tokens of
-- the log up to the end of its turn (0: an error, which has no turn); then per line its chunk, if it has tokens, and its
-- reply.  -> verdict, length, ...
-- A reply leaves only in the write that stores its tokens: the log must reach to the end of its turn. Where it does not,
-- there is no reply; where there can be no reply, the chunk is not stored either. OTHER: another one was said. UNCALLED:
-- the store has no such call, or lost it. DUP: it was said before. STALE where another agent calls: as in read_calls.

-- Why a call cannot have this reply now; nil = it can. Second, whether it has it.
local function why_unsaid(id, number, reply)
  local box = call('HMGET', mailbox_key(id), 'calls', 'said:' .. number)
  if tonumber(number) < 1 or tonumber(number) > tonumber(box[1] or '0') then return 'UNCALLED' end
  if not box[2] then return nil, false end
  local said = call('ZRANGEBYSCORE', replies_key(id), box[2], box[2])[1]
  if said ~= number .. '\n' .. reply then return 'OTHER' end
  return nil, true
end

local function say(id, number, reply)
  local mailbox = mailbox_key(id)
  local stamp = later_than(call('HGET', mailbox, 'newest') or '0')
  call('ZADD', replies_key(id), stamp, number .. '\n' .. reply)
  call('HINCRBY', mailbox, 'replies', 1)
  call('HINCRBY', mailbox, 'bytes', #reply)
  call('HSET', mailbox, 'newest', stamp, 'said:' .. number, stamp)
  note_news(id)
end

local answer, next_part = {}, 8
local numbers = string.rep('(%d+) ', 10)
for id, fence, offset, tokens, oldest, first, last, ticket, number, turn_end, key in
  string.gmatch(ARGV[7], numbers .. '([^\n]*)')
do
  local chunk
  offset, tokens = tonumber(offset), tonumber(tokens)
  if tokens > 0 then chunk, next_part = ARGV[next_part], next_part + 1 end
  local reply = ARGV[next_part]
  next_part = next_part + 1
  local verdict, _, length = judge(id, fence, key)
  local is_said
  if verdict == 'OK' and is_of_another(id, ticket) then
    lose_conversation(id, max_attempts, LOST_AGENT, '')
    verdict, length = 'STALE', 0
  elseif verdict == 'OK' then
    local why
    why, is_said = why_unsaid(id, number, reply)
    verdict = why or 'OK'
  end
  if verdict == 'OK' then
    verdict, length = renew(id, fence, offset, tokens, chunk, oldest, first, last, key)
    if verdict == 'OK' and tonumber(turn_end) > length then verdict = 'GAP' end
    if verdict == 'OK' and is_said then
      verdict = 'DUP'
    elseif verdict == 'OK' then
      say(id, number, reply)
    end
  end
  answer[#answer + 1] = verdict
  answer[#answer + 1] = length or 0
end
return answer
