--- @include keys, tasks
-- ARGV: tag of a key that holds nothing, most leases.  -> ids that are ready for it
-- Work that is all in other hands: the key with the most leases gives some back, the newest first, down to an even
-- share. Holders are counted by what they hold now; nothing is kept that could drift.
local ids_of, keys, total = {}, 1, 0 -- the key itself is one
if call('HGET', META, 'state') ~= 'RUNNING' then return {} end
for _, id in ipairs(call('ZRANGE', LEASES, 0, -1)) do
  local task = call('HMGET', task_key(id), 'key', 'fence')
  local key = task[1] or ''
  if key == ARGV[1] then return {} end
  if not ids_of[key] then ids_of[key], keys = {}, keys + 1 end
  local held = ids_of[key]
  held[#held + 1] = { id, tonumber(task[2] or '0') }
  total = total + 1
end
local largest, hog = {}, ''
for key, held in pairs(ids_of) do
  if #held > #largest or (#held == #largest and key < hog) then largest, hog = held, key end
end
local fair = math.ceil(total / keys)
table.sort(largest, function(a, b) return a[2] > b[2] or (a[2] == b[2] and tonumber(a[1]) > tonumber(b[1])) end)
local given = {}
for i = 1, math.min(#largest - fair, fair, tonumber(ARGV[2])) do
  local id = largest[i][1]
  call('HINCRBY', task_key(id), 'fence', 1)
  give_back(id)
  given[i] = id
end
return given
