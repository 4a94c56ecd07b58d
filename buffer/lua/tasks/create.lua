--- @include keys
-- ARGV: lineage, members of a group, then per group: group id, one spec per member.  -> groups created
-- Idempotent: a group that was ever created is left alone, whatever became of it.
local refused = refuse_learner(ARGV[1])
if refused then return refused end
local size, created = tonumber(ARGV[2]), 0
if size ~= group_size() then return redis.error_reply('GROUPS ' .. group_size()) end
for i = 3, #ARGV, size + 1 do
  local gid = ARGV[i]
  local ids = members(gid, size)
  if call('GETBIT', KNOWN, ids[1]) == 0 then
    call('RPUSH', specs_key(gid), unpack(ARGV, i + 1, i + size))
    set_bits(KNOWN, ids)
    call('ZADD', NEW, gid, gid)
    created = created + 1
  end
end
return created
