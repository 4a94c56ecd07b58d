--- @include keys, tasks
-- ARGV: tag of a key that holds nothing, most leases, ms.  -> ids that are ready for it
-- Work that is all in other hands: the key with the most leases gives some back, the newest first, down to an even
-- share; only those that have stood still for so long: what grows is worked on, and nobody would be sooner. Holders are counted by what they hold now; nothing is kept that could drift.
local ids_of, keys, total = {}, 1, 0 -- the key itself is one
local meta, now = call('HMGET', META, 'state', 'paused'), now_ms()
if meta[1] ~= 'RUNNING' or meta[2] then return {} end -- then nobody is granted anything
for _, id in ipairs(call('ZRANGE', LEASES, 0, -1)) do
  local task = call('HMGET', task_key(id), 'key', 'fence', 'progress')
  local key = task[1] or ''
  if key == ARGV[1] then return {} end
  if not ids_of[key] then ids_of[key], keys = {}, keys + 1 end
  local held = ids_of[key]
  held[#held + 1] = { id, tonumber(task[2] or '0'), now - tonumber(task[3] or now) >= tonumber(ARGV[3]) }
  total = total + 1
end
local largest, hog = {}, ''
for key, held in pairs(ids_of) do
  if #held > #largest or (#held == #largest and key < hog) then largest, hog = held, key end
end
local fair = math.ceil(total / keys)
table.sort(largest, function(a, b) return a[2] > b[2] or (a[2] == b[2] and tonumber(a[1]) > tonumber(b[1])) end)
local given, most = {}, math.min(#largest - fair, fair, tonumber(ARGV[2]))
for _, lease in ipairs(largest) do
  if #given >= most then break end
  if lease[3] then
    call('HINCRBY', task_key(lease[1]), 'fence', 1)
    give_back(lease[1])
    given[#given + 1] = lease[1]
  end
end
return given
