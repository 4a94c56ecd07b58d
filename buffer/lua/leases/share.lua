--- @include keys, tasks, conversations
-- ARGV: tag of a key that holds nothing, lineage of its actor's weights, most leases, ms, ms of a token.  -> ids that
-- are ready for it
-- Work that is all in other hands: the holder with the most leases gives some back, the newest first, down to an even
-- share; if the key's own holder has as much, the fullest of its other keys does. What grows is worked on, and nobody
-- would be sooner: only those go that have had no token for so long, or since they are as old fewer than their time has
-- room for; and of a holder that has twice an even share those that it has not begun. One that waits for its agent
-- stands still through no fault of its holder, and stays. Holders are counted by what they hold now; nothing is kept
-- that could drift.
local meta, now, found = call('HMGET', META, 'state', 'paused', 'lineage'), now_ms(), {}
if meta[1] ~= 'RUNNING' or meta[2] or tonumber(ARGV[2]) > tonumber(meta[3]) then return {} end -- nothing is granted
for _, id in ipairs(call('ZRANGE', LEASES, 0, -1)) do
  local task = call('HMGET', task_key(id), 'key', 'fence', 'progress', 'len', 'from')
  local key, fence = task[1] or '', tonumber(task[2] or '0')
  if key == ARGV[1] then return {} end
  found[#found + 1] = { id = id, key = key, fence = fence, idle = now - tonumber(task[3] or now),
    made = tonumber(task[4] or '0') - tonumber(task[5] or '0'), age = now - fence / 1000 }
end

-- The leases of whoever has the most of these, those of whoever asks, and an even share.
local function divide(leases, owner_of)
  local me, largest, most = owner_of(ARGV[1]), '', 0
  local held, owners = { [me] = {} }, 1
  for _, lease in ipairs(leases) do
    local owner = owner_of(lease.key)
    if not held[owner] then held[owner], owners = {}, owners + 1 end
    table.insert(held[owner], lease)
  end
  for owner, theirs in pairs(held) do
    if #theirs > most or (#theirs == most and owner < largest) then largest, most = owner, #theirs end
  end
  return held[largest] or {}, held[me], math.ceil(#leases / owners)
end

local largest, mine, fair = divide(found, holder_of)
if #mine >= fair then largest, mine, fair = divide(mine, function(key) return key end) end
table.sort(largest, function(a, b)
  return a.fence > b.fence or (a.fence == b.fence and tonumber(a.id) > tonumber(b.id))
end)

local still, has_far_more = tonumber(ARGV[4]), #largest >= 2 * fair
local function may_go(lease)
  local turn = now - turn_began(lease.id, now)
  if turn <= 0 then return false end
  if has_far_more and lease.made == 0 then return true end
  local idle, age = math.min(lease.idle, turn), math.min(lease.age, turn)
  return idle >= still or (age >= still and lease.made * tonumber(ARGV[5]) < age)
end

local given, most = {}, math.min(#largest - fair, fair - #mine, tonumber(ARGV[3]))
for _, lease in ipairs(largest) do
  if #given >= most then break end
  if may_go(lease) then
    call('HDEL', task_key(lease.id), 'fence')
    give_back(lease.id)
    given[#given + 1] = lease.id
  end
end
return given
