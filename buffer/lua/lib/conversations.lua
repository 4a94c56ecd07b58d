--- @include keys
-- A task's conversation with a live agent, and its mailbox:
--   wanted -> taken by a host, under a ticket -> ended;   wanted, taken -> lost, and the task begins anew (tasks.lua)
-- Invariant: only a ready or leased task has a mailbox, and without a call it has no tokens. Invariant: every reply in
-- it is of tokens that the task's chunks have, so chunks are never cut without it.
-- m:<task> has: want, calls, replies, bytes; ticket, host, key of the host; opened (the ms at which the actor's turn
-- began), newest (stamp of the newest reply), why (it ended); size:<number> of a call's body, said:<number> = stamp of
-- its reply, reward:<number> = its order and the reward; rewards = bytes of all of them.
-- h:<key>:<host> has: ticket, the newest that the host was given, and ids, its tasks; silent = agents of the host in a
-- row that have ended without a call, rests_until (ms).
local WANTED, TICKETS, NEWS = run .. ':wanted', run .. ':tickets', run .. ':news'

local function mailbox_key(id) return run .. ':m:' .. id end
local function calls_key(id) return run .. ':m:' .. id .. ':c' end
local function replies_key(id) return run .. ':m:' .. id .. ':r' end
local function host_key(host, key) return run .. ':h:' .. key .. ':' .. host end

-- Brokers whose memory the change did not pass through find it by its number.
local function note_news(id) call('ZADD', NEWS, call('HINCRBY', META, 'news', 1), id) end

local function want_agent(id)
  call('ZADD', WANTED, whole(now_ms()), id)
  note_news(id)
end

local function drop_mailbox(id)
  if call('UNLINK', mailbox_key(id), calls_key(id), replies_key(id)) > 0 then
    call('ZREM', WANTED, id)
    call('ZREM', TICKETS, id)
    call('ZREM', NEWS, id)
  end
end

-- Whether an actor knows another agent than the one that calls: the store was set back.
local LOST_AGENT = 'the store lost its agent'
local function is_of_another(id, ticket) return call('HGET', mailbox_key(id), 'ticket') ~= ticket end

-- Whether an agent has heard a reply that the store has not: it was set back. `heard` is the reply's stamp, 0 = none.
local LOST_REPLY = 'the store lost a reply that its agent has heard'
local function has_lost(id, heard) return heard ~= '0' and call('ZCOUNT', replies_key(id), heard, heard) == 0 end

-- A host has no more of a conversation: it counts against the host if its agent has not called.
local function note_silence(id)
  local box = call('HMGET', mailbox_key(id), 'calls', 'host', 'key')
  if box[1] == '0' and box[2] then
    local host = host_key(box[2], box[3])
    call('HINCRBY', host, 'silent', 1)
    call('EXPIRE', host, 3600)
  end
end

local PART_BYTES = 64 -- that a call or reply adds to an answer beside its own

local function mailbox_bytes(id) return tonumber(call('HGET', mailbox_key(id), 'bytes') or '0') end

-- A conversation that has no call, or whose store has lost it: tokens would be those of an agent of before.
local function is_uncalled(id) return call('HGET', mailbox_key(id), 'calls') == '0' end

local function has_replies(id) return (call('HGET', mailbox_key(id), 'replies') or '0') ~= '0' end

-- When the actor's turn began, ms: never (0) without a conversation, and now while it waits for its agent.
local function turn_began(id, now)
  local box = call('HMGET', mailbox_key(id), 'calls', 'replies', 'opened', 'why')
  if not box[1] then return 0 end
  if box[1] == box[2] and not box[4] then return now end
  return tonumber(box[3])
end

-- Returns the verdict for the holder of a ticket and, where it is OK, the calls, replies and bytes so far, why the
-- conversation has ended, and the stamp of its newest reply.
local function judge_ticket(id, ticket, key)
  local box = call('HMGET', mailbox_key(id), 'ticket', 'key', 'calls', 'replies', 'bytes', 'why', 'newest')
  if not box[3] then return 'GONE' end
  if box[1] ~= ticket or box[2] ~= key then return 'STALE' end
  return 'OK', tonumber(box[3]), tonumber(box[4]), tonumber(box[5]), box[6], box[7]
end
