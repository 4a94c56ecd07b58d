--- @include keys, tasks, conversations
-- ARGV: tag of a host's key, most bytes of a mailbox, most bytes of the rewards of calls, max attempts, then per
-- conversation: id, ticket, stamp of the newest reply that its agent has heard (0: none), why ('': it goes on), number of
-- a call (0: the whole), order of its reward, the reward ('': none).  -> verdict, ...
-- A conversation is lost (GONE) whose agent has heard a reply that the store has not, as in read_replies: its end would
-- be that of a record without a turn.
-- Of a call the reward with the highest order before the end counts, whichever copy comes last. FULL: nothing more fits,
-- and the line changes nothing; the reward of the whole always fits. DUP: nothing is left to change.
local most_bytes, most_rewards = tonumber(ARGV[2]), tonumber(ARGV[3])

-- Why a reward is not written; nil = it is.
local function add_reward(id, number, order, reward)
  local mailbox, field, text = mailbox_key(id), 'reward:' .. number, order .. ' ' .. reward
  local box = call('HMGET', mailbox, 'bytes', 'rewards', field)
  if box[3] and tonumber(string.match(box[3], '^%d+')) >= tonumber(order) then return 'DUP' end
  local more = #text - #(box[3] or '')
  local bytes, rewards = tonumber(box[1]) + more, tonumber(box[2] or '0') + more
  if number ~= '0' and (bytes > most_bytes or rewards > most_rewards) then return 'FULL' end
  call('HSET', mailbox, field, text, 'bytes', bytes, 'rewards', rewards)
end

local answer = {}
draw_on_reserve()
for i = 5, #ARGV, 7 do
  local id, ticket, heard, why, number, order, reward = unpack(ARGV, i, i + 6)
  local verdict, calls, _, _, ended = judge_ticket(id, ticket, ARGV[1])
  if verdict == 'OK' and ended then
    verdict = 'DUP'
  elseif verdict == 'OK' and has_lost(id, heard) then
    lose_conversation(id, tonumber(ARGV[4]), LOST_REPLY, ARGV[1])
    verdict = 'GONE'
  elseif verdict == 'OK' and tonumber(number) > calls then
    verdict = 'GAP'
  elseif verdict == 'OK' then
    local refused = reward ~= '' and add_reward(id, number, order, reward)
    if why ~= '' and refused ~= 'FULL' then
      note_silence(id)
      call('HSET', mailbox_key(id), 'why', why, 'opened', whole(now_ms()))
      call('ZREM', TICKETS, id)
      note_news(id)
    elseif refused then
      verdict = refused
    end
  end
  answer[#answer + 1] = verdict
end
return answer
