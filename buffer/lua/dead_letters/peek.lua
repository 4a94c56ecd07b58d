--- @include keys
-- ARGV: count.  -> {group id, bytes, task id, ...}, ...   The oldest complete units, as CLAIM would take them.
local size, answer = group_size() or 1, {}
for i, gid in ipairs(call('ZRANGE', BUF, 0, ARGV[1] - 1)) do
  local unit = { gid, 0 }
  for _, id in ipairs(members(gid, size)) do
    if call('SISMEMBER', DONE, id) == 1 then
      unit[2] = unit[2] + call('STRLEN', record_key(id))
      unit[#unit + 1] = id
    end
  end
  answer[i] = unit
end
return answer
