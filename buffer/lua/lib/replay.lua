--- @include keys
-- The life of a unit that is kept to be trained again:
--   committed -> replay -> reused by batch k -> replay, with one use more -> ... -> gone
-- Invariant: a kept unit is in exactly one of `replay` and `reused`, and its tasks are committed. So nothing
-- here takes part in what is created, admitted or conserved. x:<gid> has the parts of a kept unit.

-- The rating that batch k's seal gave a unit to keep: `<uses> <born> <rank>`; nil = it is not kept.
local function rating_of(k, gid) return call('HGET', claim_state_key(k), 'keep:' .. gid) or nil end

local function list_kept(gid)
  local unit = call('HMGET', kept_key(gid), 'rank', 'born')
  call('ZADD', REPLAY, unit[1], gid)
  call('ZADD', AGES, unit[2], gid)
end

-- Keeps the records of a unit that was just committed.
local function keep_unit(gid, ids, rating)
  local most, born, rank = string.match(rating, '^(%S+) (%S+) (%S+)$')
  local bytes = 0
  for _, id in ipairs(ids) do bytes = bytes + call('STRLEN', record_key(id)) end
  call('HSET', kept_key(gid), 'ids', table.concat(ids, ' '), 'bytes', bytes, 'uses', 0,
    'most', most, 'born', born, 'rank', rank)
  call('HINCRBY', META, 'kept_bytes', bytes)
  list_kept(gid)
end

local function ids_of_kept(gid)
  local ids = {}
  for id in string.gmatch(call('HGET', kept_key(gid), 'ids') or '', '%d+') do ids[#ids + 1] = id end
  return ids
end

local function forget_kept(gid)
  for _, id in ipairs(ids_of_kept(gid)) do call('UNLINK', record_key(id)) end
  call('HINCRBY', META, 'kept_bytes', 0 - tonumber(call('HGET', kept_key(gid), 'bytes') or '0')) -- a "-0" is refused
  call('UNLINK', kept_key(gid))
  call('ZREM', REPLAY, gid)
  call('ZREM', AGES, gid)
  call('ZREM', REUSED, gid)
end

-- A batch has done with a kept unit, having used it once or not at all.
local function give_kept_back(gid, uses)
  call('ZREM', REUSED, gid)
  local used = call('HINCRBY', kept_key(gid), 'uses', uses)
  if used < tonumber(call('HGET', kept_key(gid), 'most') or '0') then
    list_kept(gid)
  else
    forget_kept(gid)
  end
end
