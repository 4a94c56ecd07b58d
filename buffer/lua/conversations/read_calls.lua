--- @include keys, tasks, conversations
-- ARGV: tag of a key, max attempts, most bytes, then per task: id, fence, the ticket that its actor knows (0: none),
-- calls that it has, replies that it knows to be stored.
-- -> {verdict, ticket, calls so far, why it ended, {number, reward, ...}, {line of a call, 1 if it has its reply}, ...}
-- UNCALLED: the task has no mailbox; want an agent again. Another ticket than the actor knows: the store was set back,
-- and another agent has begun, to which the actor's tokens say nothing. Fewer replies than the actor knows: it was set
-- back, too, and the next holder says the lost ones from the log, which may not have their tokens any more. An end comes
-- behind all calls, with all rewards.
local room, answer = tonumber(ARGV[3]), {}

local function rewards_of(id)
  local found, rewards = call('HGETALL', mailbox_key(id)), {}
  for i = 1, #found, 2 do
    local number = string.match(found[i], '^reward:(%d+)$')
    if number then
      rewards[#rewards + 1], rewards[#rewards + 2] = number, string.match(found[i + 1], '^%d+ (.*)$')
    end
  end
  return rewards
end

local function read(id, at, box)
  local calls, line = tonumber(box[2]), { 'OK', box[1] or '0', tonumber(box[2]), '', {} }
  while at < calls and room > 0 do
    local text = call('LRANGE', calls_key(id), at, at)[1]
    at = at + 1
    line[#line + 1] = { text, call('HEXISTS', mailbox_key(id), 'said:' .. whole(at)) }
    room = room - #text - PART_BYTES
  end
  if box[3] and room > 0 then
    line[4], line[5] = box[3], rewards_of(id)
    room = room - #box[3] - tonumber(box[4] or '0') - PART_BYTES
  end
  return line
end

for i = 4, #ARGV, 5 do
  local id, known = ARGV[i], ARGV[i + 2]
  local verdict, state = judge(id, ARGV[i + 1], ARGV[1])
  local line = { verdict }
  if verdict == 'OK' then
    local box = call('HMGET', mailbox_key(id), 'ticket', 'calls', 'why', 'rewards', 'replies')
    if known ~= '0' and box[1] ~= known then
      lose_conversation(id, tonumber(ARGV[2]), LOST_AGENT, '')
      line = { 'STALE' }
    elseif not box[2] then
      line = { 'UNCALLED' }
    elseif tonumber(box[5]) < tonumber(ARGV[i + 4]) then
      return_uncharged(id, state)
      line = { 'STALE' }
    else
      line = read(id, tonumber(ARGV[i + 3]), box)
    end
  end
  answer[#answer + 1] = line
end
return answer
