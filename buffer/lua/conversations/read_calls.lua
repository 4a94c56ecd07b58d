--- @include keys, tasks, conversations
-- ARGV: tag of a key, max attempts, most bytes, then per task: id, fence, the ticket that its actor knows (0: none),
-- calls that it has, replies that it knows to be stored.
-- -> {verdict, ticket, calls so far, why it ended, {number, reward, ...}, {line of a call, 1 if it has its reply}, ...}
-- UNCALLED: the task has no mailbox; want an agent again. Another ticket than the actor knows: the store was set back,
-- and another agent has begun, to which the actor's tokens say nothing. Fewer replies than the actor knows: it was set
-- back, too, and the next holder says the lost ones from the log, which may not have their tokens any more.
local room, answer = tonumber(ARGV[3]), {}

local function rewards_of(id)
  local found, rewards = call('HGETALL', mailbox_key(id)), {}
  for i = 1, #found, 2 do
    local number = string.match(found[i], '^reward:(%d+)$')
    if number then rewards[#rewards + 1], rewards[#rewards + 2] = number, found[i + 1] end
  end
  return rewards
end

local function read(id, calls, box)
  local line = { 'OK', box[1] or '0', tonumber(box[2]), box[3] or '', box[3] and rewards_of(id) or {} }
  for at, text in ipairs(call('LRANGE', calls_key(id), calls, -1)) do
    if room <= 0 then break end
    line[#line + 1] = { text, call('HEXISTS', mailbox_key(id), 'said:' .. whole(calls + at)) }
    room = room - #text
  end
  return line
end

for i = 4, #ARGV, 5 do
  local id, known = ARGV[i], ARGV[i + 2]
  local verdict, state = judge(id, ARGV[i + 1], ARGV[1])
  local line = { verdict }
  if verdict == 'OK' then
    local box = call('HMGET', mailbox_key(id), 'ticket', 'calls', 'why', 'replies')
    if known ~= '0' and box[1] ~= known then
      lose_conversation(id, tonumber(ARGV[2]), 'the store lost its agent', '')
      line = { 'STALE' }
    elseif not box[2] then
      line = { 'UNCALLED' }
    elseif tonumber(box[4]) < tonumber(ARGV[i + 4]) then
      return_uncharged(id, state)
      line = { 'STALE' }
    else
      line = read(id, tonumber(ARGV[i + 3]), box)
    end
  end
  answer[#answer + 1] = line
end
return answer
