--- @include keys, tasks, conversations
-- ARGV: bytes to free.  -> {tasks, bytes freed}
-- Leasing is closed because memory is short, so a ready task keeps its chunks, and its agent's mailbox, for
-- nobody: the largest go first, and their tasks begin anew.
local found, freed, count = {}, 0, 0
for _, id in ipairs(call('ZRANGE', READY, 0, -1)) do
  local bytes = tonumber(call('HGET', task_key(id), 'bytes') or '0') + mailbox_bytes(id)
  if bytes > 0 then found[#found + 1] = { id, bytes } end
end
table.sort(found, function(a, b) return a[2] > b[2] or (a[2] == b[2] and a[1] < b[1]) end)
for _, task in ipairs(found) do
  if freed >= tonumber(ARGV[1]) then break end
  cut(task[1])
  freed, count = freed + task[2], count + 1
end
return { count, freed }
