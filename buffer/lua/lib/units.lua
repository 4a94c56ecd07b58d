--- @include keys, conversations
-- The life of a unit, which is a group of tasks:
--   new -> open (first member leased) -> buf (no member unfinished) -> claim k -> committed
-- Any of the first four may end as dropped or cancelled instead. Invariant: a unit is in exactly one of
-- these, and g:<gid> holds the members of an open unit that are neither done nor dead.

-- While a unit is new, its members are a list of their specs; tasks are made when the unit is begun.
local function take_specs(gid)
  local specs = call('LRANGE', specs_key(gid), 0, -1)
  call('UNLINK', specs_key(gid))
  call('ZREM', NEW, gid)
  return specs
end

-- Whether a training task's unit is not begun yet.
local function is_new(id)
  local size = tonumber(id) < EVAL_BASE and group_size() -- none: the store was wiped
  return size and call('ZSCORE', NEW, whole(math.floor(id / size)))
end

local function make_task(id, spec) call('HSET', task_key(id), 'st', 'R', 'spec', spec) end

-- A dead letter, or what was one until it was purged.
local function is_dead(id)
  return call('HGET', task_key(id), 'st') == 'X' or call('GETBIT', PURGED, id) == 1
end

-- Tasks that need nothing more leave one bit each behind; their records may still be wanted.
local function leave_bits(ids, fate)
  local keys = {}
  for _, id in ipairs(ids) do
    keys[#keys + 1] = task_key(id)
    keys[#keys + 1] = chunks_key(id)
  end
  if #keys > 0 then call('UNLINK', unpack(keys)) end
  set_bits(fate, ids)
end

local function forget(ids, fate)
  local records = {}
  for i, id in ipairs(ids) do records[i] = record_key(id) end
  if #ids > 0 then call('UNLINK', unpack(records)) end
  leave_bits(ids, fate)
end

-- Ends a unit early; its dead members stay with the dead letters. Returns how many tasks met this fate.
local function end_unit(gid, size, fate)
  call('UNLINK', unfinished_key(gid), specs_key(gid))
  call('ZREM', NEW, gid)
  call('SREM', OPEN, gid)
  call('ZREM', BUF, gid)
  local ended = {}
  for _, id in ipairs(members(gid, size)) do
    if not is_dead(id) then
      drop_mailbox(id)
      unlist(id)
      call('SREM', DONE, id)
      call('SREM', CLAIMED, id)
      ended[#ended + 1] = id
    end
  end
  forget(ended, fate)
  return #ended
end

local function drop_unit(gid, size, reason)
  call('SADD', REASONS, reason)
  return end_unit(gid, size, dropped_key(reason))
end

-- Makes dead letters of a claimed unit's tasks, with their records. Returns how many.
local function unit_to_dead_letters(gid, size, why)
  local moved = 0
  for _, id in ipairs(members(gid, size)) do
    if call('SREM', CLAIMED, id) == 1 then
      call('HSET', task_key(id), 'st', 'X', 'why', why, 'record', call('EXISTS', record_key(id)))
      call('ZADD', DEAD, now_ms(), id)
      moved = moved + 1
    end
  end
  return moved
end

-- Members of an open unit are done or dead: when they were the last, the unit enters the buffer.
local function finish_members(gid, ids)
  call('SREM', unfinished_key(gid), unpack(ids))
  if call('EXISTS', unfinished_key(gid)) == 0 then
    call('SREM', OPEN, gid)
    call('ZADD', BUF, call('HINCRBY', META, 'arrivals', 1), gid)
  end
end

-- A member died: the unit goes on with the others, or is dropped at once when they cannot be enough.
local function lose_member(id)
  local size = group_size()
  local gid = whole(math.floor(id / size))
  local alive = 0
  for _, member in ipairs(members(gid, size)) do
    if not is_dead(member) then alive = alive + 1 end
  end
  if alive < math.min(tonumber(call('HGET', META, 'min_group_size')), size) then
    drop_unit(gid, size, 'group_broken')
  else
    finish_members(gid, { id })
  end
end
