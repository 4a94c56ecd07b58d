--- @include keys, units, tasks
-- ARGV: incarnation, ttl ms, n, lineage and step of the actor's weights, tag of its key, number of the
-- request, ' number ' of each that was given up unanswered, 1 = only tasks that an actor gave back or lost,
-- name of the teacher that it is ('' = none)
-- -> {'OK', fence, {id, spec, length, {chunk, ...}}, ...} | {'WAIT'} | {'EMPTY'} | {'DONE'}
-- A teacher gets finished tasks that wait for its score, the oldest units first, each with its record as the one chunk.
-- Evaluations first, then tasks of started units (resumed ones score -1), then new units in order. Nothing of
-- training to weights that are too old already. The field `oldest` is a number of the oldest version that the
-- tokens of a task may have: that of its holder's weights, or of those whose tokens came with the lease.
-- A request whose answer was lost comes again under its number (0 = never), perhaps through another broker: it is
-- granted once more what nobody has renewed since, under the same fence. What was granted to one that was given up
-- goes back. An hour later a request is forgotten. A copy of an earlier one, late through another broker, gets
-- nothing: its grant would be remembered in place of the newer one's, whose answer may be lost.
local meta = call('HMGET', META, 'state', 'lineage', 'version', 'group_size', 'units_per_batch',
  'max_policy_lag', 'margin', 'fence', 'paused')
if meta[1] == 'ENDED' then return { 'DONE' } end
if meta[1] ~= 'RUNNING' then return { 'WAIT' } end

-- Whoever is alone cannot know whether its failures are its own. The pause that they lead to ends when another holder
-- asks for work: from then on a death counts only where both have failed.
local function end_pause_of_another(holder)
  if call('ZCARD', HOLDERS) ~= 1 or holder == '' or call('ZSCORE', HOLDERS, holder) then return false end
  call('HDEL', META, 'paused')
  call('UNLINK', DEATHS)
  return true
end
local teacher = ARGV[10] ~= '' and ARGV[10]
if meta[9] and (teacher or not end_pause_of_another(holder_of(ARGV[6]))) then return { 'WAIT' } end
local lineage, version, size = tonumber(meta[2]), tonumber(meta[3]), tonumber(meta[4])
local actor_lineage, actor_step = tonumber(ARGV[4]), tonumber(ARGV[5])
if actor_lineage > lineage then return { 'WAIT' } end -- the store was rewound: wait for the learner
local room, picked, first_spec = tonumber(ARGV[3]), {}, {}

local function pick(ids)
  for _, id in ipairs(ids) do picked[#picked + 1] = id end
  room = room - #ids
end

local begun_only = ARGV[9] == '1'
local function pick_ready(key)
  local ids = call('ZRANGEBYSCORE', key, '-inf', begun_only and '(0' or '+inf', 'LIMIT', 0, room)
  if #ids > 0 then call('ZREM', key, unpack(ids)) end
  pick(ids)
end

-- Batches by which the actor's weights are behind, by the steps at which later lineages left its own.
local function policy_lag()
  local fork = actor_step
  for later = actor_lineage + 1, lineage do
    fork = math.min(fork, tonumber(call('HGET', LINEAGES, later) or '0'))
  end
  return math.max(0, version - fork) + (actor_step - fork)
end

-- Units that are begun and not yet consumed by an optimizer step.
local function units_in_flight()
  local units = call('SCARD', OPEN) + call('ZCARD', BUF)
  for _, k in ipairs(call('ZRANGEBYSCORE', CLAIMS, '(' .. version, '+inf')) do
    units = units + call('ZCARD', claim_key(k))
  end
  return units
end

local function start_unit(gid)
  local ids, specs, now = members(gid, size), take_specs(gid), {}
  call('SADD', OPEN, gid)
  call('SADD', unfinished_key(gid), unpack(ids))
  for i, id in ipairs(ids) do
    if i <= room then
      now[i], first_spec[id] = id, specs[i]
    else
      make_task(id, specs[i])
      call('ZADD', READY, id, id)
    end
  end
  pick(now)
end

-- Leases that were not renewed still have the deadline of their grant.
local request_key = requests_key(ARGV[1], ARGV[6])
local last = call('HMGET', request_key, 'seq', 'fence', 'deadline')
local is_repeated = last[1] == ARGV[7]
if ARGV[7] ~= '0' and tonumber(last[1] or '0') > tonumber(ARGV[7]) then return { 'WAIT' } end
if is_repeated or (last[1] and string.find(ARGV[8], ' ' .. last[1] .. ' ', 1, true)) then
  for _, leases in ipairs(teacher and { SCORE_LEASES } or { EVAL_LEASES, LEASES }) do
    for _, id in ipairs(call('ZRANGEBYSCORE', leases, last[3], last[3])) do
      if call('HGET', task_key(id), 'fence') ~= last[2] then
        -- it is of another grant in the same moment
      elseif is_repeated then
        pick({ id })
      else
        return_uncharged(id, 'L')
      end
    end
  end
end
local fence = #picked > 0 and last[2]
if fence then
  room = 0
  draw_on_reserve() -- other grants begin with a removal
end

if teacher and room > 0 then
  pick_ready(unscored_key(teacher))
  room = 0
end
for _, round in ipairs(call('ZRANGE', ROUNDS, 0, -1)) do
  local of, step = string.match(round, '(%d+):(%d+)')
  of, step = tonumber(of), tonumber(step)
  if room > 0 and (actor_lineage > of or (actor_lineage == of and actor_step >= step)) then
    pick_ready(round_key(round, ':r'))
  end
end
local batches_left = tonumber(meta[6]) + 1 - policy_lag()
if room > 0 and batches_left > 0 then pick_ready(READY) end
if room > 0 and not begun_only then
  local cap = batches_left * tonumber(meta[5]) * tonumber(meta[7])
  local in_flight = units_in_flight()
  for _, gid in ipairs(call('ZRANGE', NEW, 0, math.ceil(room / size) - 1)) do
    -- A unit is split only when it is the first of the call: the next call starts it whole.
    if in_flight >= cap or room < 1 or (room < size and #picked > 0) then break end
    start_unit(gid)
    in_flight = in_flight + 1
  end
end
if #picked == 0 then return { call('ZCARD', NEW) > 0 and 'WAIT' or 'EMPTY' } end

local now = now_ms()
local weights = actor_lineage * 2 ^ 32 + actor_step
local shown = whole(weights)
if not fence then
  fence = later_than(meta[8])
  call('HSET', META, 'fence', fence, 'ttl', ARGV[2])
end
local since, deadline = whole(now), whole(now + tonumber(ARGV[2]))
local answer, scored = { 'OK', fence }, { [LEASES] = {}, [EVAL_LEASES] = {}, [SCORE_LEASES] = {} }

-- What the actor needs to begin a task, or to go on where its last holder was.
local function grant(id)
  local key, spec = task_key(id), first_spec[id]
  if teacher then
    call('HSET', key, 'st', 'L', 'fence', fence, 'progress', since, 'inc', ARGV[1], 'key', ARGV[6])
    return { id, call('HGET', key, 'spec'), 0, { call('GET', record_key(id)) } }
  end
  if spec then
    call('HSET', key, 'st', 'L', 'fence', fence, 'progress', since, 'inc', ARGV[1], 'key', ARGV[6], 'spec', spec,
      'oldest', shown)
    return { id, spec, 0, {} }
  end
  local task = call('HMGET', key, 'spec', 'len', 'bytes', 'oldest')
  local oldest = task[2] and math.min(weights, tonumber(task[4] or '0')) or weights
  call('HSET', key, 'st', 'L', 'fence', fence, 'progress', since, 'inc', ARGV[1], 'key', ARGV[6],
    'given', task[3] or '0', 'from', task[2] or '0', 'oldest', whole(oldest))
  local chunks = task[2] and call('LRANGE', chunks_key(id), 0, -1) or {}
  return { id, task[1], tonumber(task[2] or '0'), chunks }
end

for _, id in ipairs(picked) do
  local deadlines = scored[lease_key(id, teacher)]
  deadlines[#deadlines + 1] = deadline
  deadlines[#deadlines + 1] = id
  answer[#answer + 1] = grant(id)
end
if ARGV[7] ~= '0' then
  call('HSET', request_key, 'seq', ARGV[7], 'fence', fence, 'deadline', deadline)
  call('EXPIRE', request_key, 3600)
end
if ARGV[6] ~= '' and not teacher then
  call('ZADD', HOLDERS, since, holder_of(ARGV[6]))
  call('ZREMRANGEBYSCORE', HOLDERS, '-inf', now - 3600000)
end
for leases, deadlines in pairs(scored) do
  if #deadlines > 0 then call('ZADD', leases, unpack(deadlines)) end
end
return answer
