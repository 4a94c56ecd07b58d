--- @include keys, conversations
-- ARGV: at most so many tasks of a set are looked at, and the others counted as their mean
-- -> bytes of records, and of unfinished completions with their mailboxes
local most = tonumber(ARGV[1])

local function estimate(count, ids, bytes_of)
  local total = 0
  for _, id in ipairs(ids) do total = total + bytes_of(id) end
  return #ids > 0 and math.floor(total * count / #ids) or 0
end

local function record_bytes(id) return call('STRLEN', record_key(id)) end

local function partial_bytes(id) return tonumber(call('HGET', task_key(id), 'bytes') or '0') + mailbox_bytes(id) end

local total = tonumber(call('HGET', META, 'kept_bytes') or '0')
for _, set in ipairs({ DONE, CLAIMED }) do
  total = total + estimate(call('SCARD', set), call('SRANDMEMBER', set, most), record_bytes)
end
local with_records = { SCORE_LEASES }
for i, teacher in ipairs(call('SMEMBERS', TEACHERS)) do with_records[1 + i] = unscored_key(teacher) end
for _, set in ipairs(with_records) do
  total = total + estimate(call('ZCARD', set), call('ZRANGE', set, 0, most - 1), record_bytes)
end
for _, set in ipairs({ READY, LEASES }) do
  total = total + estimate(call('ZCARD', set), call('ZRANGE', set, 0, most - 1), partial_bytes)
end
return total
