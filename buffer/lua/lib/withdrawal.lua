--- @include keys, units, conversations
-- Taking units and tasks out of wherever they are, for a
-- learner after the store lost writes, and an operator with a dead letter.

-- A unit is committed as a whole; dead members have no bit.
local function is_committed(ids)
  for _, id in ipairs(ids) do
    if call('GETBIT', COMMITTED, id) == 1 then return true end
  end
  return false
end

-- A batch is trained without a unit's dead members, so they stay dead letters. A unit of dead members only
-- was never in a batch: then this store has lost that an operator revived it.
local function dead_but_not_all(ids)
  local dead, count = {}, 0
  for _, id in ipairs(ids) do
    if is_dead(id) then
      dead[id] = true
      count = count + 1
    end
  end
  return count < #ids and dead or {}
end

-- Takes a unit out of its place; members of a new one become tasks. A batch that loses a unit this way is
-- open again, and gone when it is empty.
local function withdraw_unit(gid)
  call('UNLINK', unfinished_key(gid))
  if call('ZSCORE', NEW, gid) then
    local ids = members(gid, group_size())
    for i, spec in ipairs(take_specs(gid)) do make_task(ids[i], spec) end
    return
  end
  if call('SREM', OPEN, gid) + call('ZREM', BUF, gid) > 0 then return end
  for _, k in ipairs(call('ZRANGE', CLAIMS, 0, -1)) do
    if call('ZREM', claim_key(k), gid) == 1 then
      call('HDEL', claim_state_key(k), 'sealed')
      if call('EXISTS', claim_key(k)) == 0 then
        call('UNLINK', claim_state_key(k))
        call('ZREM', CLAIMS, k)
      end
    end
  end
end

-- Takes a task out of its place, a bitmap of ended tasks included; what it holds stays, but for its mailbox, and for a
-- record without its score, which nobody may train.
local function withdraw_task(id)
  drop_mailbox(id)
  unlist(id)
  if call('HDEL', task_key(id), 'teacher') == 1 then call('UNLINK', record_key(id)) end
  call('SREM', DONE, id)
  call('SREM', CLAIMED, id)
  call('ZREM', DEAD, id)
  local fates = { CANCELLED, PURGED }
  for _, reason in ipairs(call('SMEMBERS', REASONS)) do fates[#fates + 1] = dropped_key(reason) end
  for _, fate in ipairs(fates) do
    if call('GETBIT', fate, id) == 1 then call('SETBIT', fate, id, 0) end
  end
  call('SETBIT', KNOWN, id, 1)
end
