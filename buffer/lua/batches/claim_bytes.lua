--- @include keys
-- ARGV: k.  -> bytes of the records that batch k holds
local size, total = group_size(), 0
for _, gid in ipairs(call('ZRANGE', claim_key(ARGV[1]), 0, -1)) do
  for _, id in ipairs(among(CLAIMED, members(gid, size))) do total = total + call('STRLEN', record_key(id)) end
end
return total
