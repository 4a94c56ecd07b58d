-- Names of the keys, and small functions over them. KEYS[1] is the run's prefix. The table of keys is
-- in buffer/operations/keys.py.
local call = redis.call
local run = KEYS[1]
local META, LINEAGES = run .. ':meta', run .. ':lineages'
local KNOWN, COMMITTED, CANCELLED = run .. ':known', run .. ':committed', run .. ':cancelled'
local REASONS, DEAD, PURGED = run .. ':reasons', run .. ':dead', run .. ':purged'
local AGAIN = run .. ':again'
local NEW, OPEN, BUF = run .. ':new', run .. ':open', run .. ':buf'
local READY, DONE, CLAIMED, CLAIMS = run .. ':ready', run .. ':done', run .. ':claimed', run .. ':claims'
local ROUNDS = run .. ':rounds'
local REPLAY, AGES, REUSED = run .. ':replay', run .. ':replay:age', run .. ':reused'
local TEACHERS = run .. ':teachers'
local HOLDERS, DEATHS, SUSPENDED = run .. ':holders', run .. ':deaths', run .. ':suspended'
local EVAL_BASE = 2 ^ 48

local function task_key(id) return run .. ':t:' .. id end
local function chunks_key(id) return run .. ':t:' .. id .. ':p' end
local function record_key(id) return run .. ':e:' .. id end
local function unfinished_key(gid) return run .. ':g:' .. gid end
local function specs_key(gid) return run .. ':s:' .. gid end
local function claim_key(k) return run .. ':c:' .. k end
local function claim_state_key(k) return run .. ':c:' .. k .. ':s' end
local function kept_key(gid) return run .. ':x:' .. gid end
local function round_key(round, part) return run .. ':v:' .. round .. (part or '') end
local function requests_key(incarnation, tag) return run .. ':l:' .. tag .. ':' .. incarnation end
local function dropped_key(reason) return run .. ':dropped:' .. reason end
local function unscored_key(teacher) return run .. ':unscored:' .. teacher end
local LEASES, EVAL_LEASES, SCORE_LEASES = run .. ':lease', run .. ':lease:eval', run .. ':lease:score'

-- The teacher whose score a finished training task waits for, or is given; false or nil = none.
local function teacher_of(id) return tonumber(id) < EVAL_BASE and call('HGET', task_key(id), 'teacher') end

local function lease_key(id, teacher)
  if tonumber(id) >= EVAL_BASE then return EVAL_LEASES end
  return teacher and SCORE_LEASES or LEASES
end

-- Takes a training task out of the ready ones and of the leases, with a score or before it.
local function unlist(id)
  local teacher = teacher_of(id)
  call('ZREM', teacher and unscored_key(teacher) or READY, id)
  call('ZREM', lease_key(id, teacher), id)
end

local function now_ms()
  local time = call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- A whole number as text: what Redis makes of a number by itself (%.17g) costs ten times as much.
local function whole(number) return string.format('%d', number) end

-- A number higher than one before and never below the clock, µs: a store that lost its last seconds gives none twice.
local function later_than(number)
  local time = call('TIME')
  return whole(math.max(tonumber(number) + 1, time[1] * 1000000 + time[2]))
end

-- Redis refuses the first write of a script when it is full, if that write could take memory, and lets
-- a script end what it began. Operations that free memory, or that the way out needs, begin with a
-- removal; where there is none to begin with, with this one of nothing.
local function draw_on_reserve() call('UNLINK', run .. ':nothing') end

-- A key that actors registered with an enrolment key is tagged 'enrolment~own'; together they are one holder.
local function holder_of(tag) return string.match(tag, '^[^~]*') end

local function group_size() return tonumber(call('HGET', META, 'group_size')) end

-- Whole units among so many tasks, at least one.
local function units_of(tasks, size) return math.max(1, math.floor(tasks / size)) end

-- The ids of a unit's members, as strings: group g of size n holds the tasks g*n .. g*n + n-1.
local function members(gid, size)
  local ids = {}
  for i = 0, size - 1 do ids[i + 1] = whole(gid * size + i) end
  return ids
end

-- Those of some ids that are in a set.
local function among(set, ids)
  local found = {}
  for i, is_in in ipairs(call('SMISMEMBER', set, unpack(ids))) do
    if is_in == 1 then found[#found + 1] = ids[i] end
  end
  return found
end

-- Sets the bits of some ids. Those that follow each other, as the members of a group, are one change.
local function set_bits(bitmap, ids)
  local changes, i = {}, 1
  while i <= #ids do
    local first, length = tonumber(ids[i]), 1
    while length < 32 and tonumber(ids[i + length] or -1) == first + length do length = length + 1 end
    for _, part in ipairs({ 'SET', 'u' .. length, ids[i], whole(2 ^ length - 1) }) do
      changes[#changes + 1] = part
    end
    i = i + length
  end
  if #changes > 0 then call('BITFIELD', bitmap, unpack(changes)) end
end

-- The learner's fence. Returns an error reply for a learner that no longer owns the run, else nil.
local function refuse_learner(lineage)
  local current = call('HGET', META, 'lineage')
  if not current then return redis.error_reply('NORUN') end
  if tonumber(lineage) < tonumber(current) then return redis.error_reply('LOST ' .. current) end
  if tonumber(lineage) > tonumber(current) then return redis.error_reply('REWOUND ' .. current) end
  return nil
end
