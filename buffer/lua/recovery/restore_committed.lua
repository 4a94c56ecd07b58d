--- @include keys, units, withdrawal
-- ARGV: lineage, group id, ...  -> units that were not committed in this store
-- They are inside a durable checkpoint: wherever this store has them, one bit per task is left.
local refused = refuse_learner(ARGV[1])
if refused then return refused end
local size, restored = group_size(), 0
for i = 2, #ARGV do
  local ids = members(ARGV[i], size)
  if not is_committed(ids) then
    withdraw_unit(ARGV[i])
    local spared = dead_but_not_all(ids)
    for _, id in ipairs(ids) do
      if not spared[id] then
        withdraw_task(id)
        forget({ id }, COMMITTED)
      end
    end
    restored = restored + 1
  end
end
return restored
