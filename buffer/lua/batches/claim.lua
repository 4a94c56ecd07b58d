--- @include keys
-- ARGV: lineage, k, units, start (0|1), most tasks to move in one call, units in it that the caller has read,
-- in order of their ids (0|1)
-- -> {'CLOSED'} | {'MORE'} | {'OK', mask it was sealed with ('' = unsealed), starts, {group id, task id, ...}, ...}
-- Sticky: what batch k has claimed stays in it; until it is sealed, the oldest complete units fill it up.
-- While it is not full, and the caller knew all that it held, only what this call moved is listed: most
-- calls move nothing. In order of ids the batch has the k-th units by number and no others, however they came.
local refused = refuse_learner(ARGV[1])
if refused then return refused end
local meta = call('HMGET', META, 'state', 'committed')
if meta[1] ~= 'RUNNING' then return { 'CLOSED' } end
local k = ARGV[2]
if tonumber(k) <= tonumber(meta[2]) then return redis.error_reply('COMMITTED ' .. meta[2]) end
local claim, state, size = claim_key(k), claim_state_key(k), group_size()
local sealed = call('HGET', state, 'sealed') or ''
draw_on_reserve()
call('ZADD', CLAIMS, k, k)
if ARGV[4] == '1' then call('HINCRBY', state, 'starts', 1) end

-- Complete units for this batch, at most so many, each with its score in the claim: that of its age, or its id.
local function complete_units(most)
  if ARGV[7] ~= '1' then return call('ZRANGE', BUF, 0, most - 1, 'WITHSCORES') end
  local found, units = {}, tonumber(ARGV[3])
  for gid = (k - 1) * units, k * units - 1 do
    if #found < 2 * most and call('ZSCORE', BUF, whole(gid)) then
      found[#found + 1] = whole(gid)
      found[#found + 1] = whole(gid)
    end
  end
  return found
end

local answer = { 'OK', sealed, tonumber(call('HGET', state, 'starts') or '0') }
local held = call('ZCARD', claim)
local missing = sealed ~= '' and 0 or tonumber(ARGV[3]) - held
if missing > 0 then
  local room = math.min(missing, units_of(ARGV[5], size))
  local oldest = complete_units(room)
  local knew_all = held == tonumber(ARGV[6])
  for i = 1, #oldest, 2 do
    call('ZREM', BUF, oldest[i])
    call('ZADD', claim, oldest[i + 1], oldest[i])
    local finished = among(DONE, members(oldest[i], size)) -- dead members are in no batch
    if #finished > 0 then
      call('SREM', DONE, unpack(finished))
      call('SADD', CLAIMED, unpack(finished))
    end
    answer[#answer + 1] = { oldest[i], unpack(finished) }
  end
  if #oldest / 2 == room and room < missing then return { 'MORE' } end
  if knew_all and #oldest / 2 < missing then return answer end
  answer = { unpack(answer, 1, 3) }
end

for _, gid in ipairs(call('ZRANGE', claim, 0, -1)) do
  answer[#answer + 1] = { gid, unpack(among(CLAIMED, members(gid, size))) }
end
return answer
