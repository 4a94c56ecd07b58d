--- @include keys, units, rounds
-- ARGV: lineage, most tasks to move in one call.  -> {tasks cancelled, 1 if there are more}
-- Ends the run: what is not trained is cancelled, and actors that ask for work hear DONE.
local refused = refuse_learner(ARGV[1])
if refused then return refused end
draw_on_reserve()
call('HSET', META, 'state', 'ENDED')
local size, cancelled = group_size(), 0
local room = units_of(ARGV[2], size)

local function cancel(units)
  for _, gid in ipairs(units) do cancelled = cancelled + end_unit(gid, size, CANCELLED) end
  room = room - #units
end

if room > 0 then cancel(call('ZRANGE', NEW, 0, room - 1)) end
if room > 0 then cancel(call('SRANDMEMBER', OPEN, room)) end
if room > 0 then cancel(call('ZRANGE', BUF, 0, room - 1)) end
for _, k in ipairs(call('ZRANGEBYSCORE', CLAIMS, '(' .. call('HGET', META, 'version'), '+inf')) do
  if room > 0 then
    local units = call('ZRANGE', claim_key(k), 0, room - 1)
    if #units > 0 then call('ZREM', claim_key(k), unpack(units)) end
    cancel(units)
    if call('EXISTS', claim_key(k)) == 0 then
      call('UNLINK', claim_state_key(k))
      call('ZREM', CLAIMS, k)
    end
  end
end
for _, round in ipairs(call('ZRANGE', ROUNDS, 0, -1)) do
  if room > 0 then
    room = room - end_round_tasks(round, room)
    if call('SCARD', round_key(round, ':u')) == 0 then close_round(round) end
  end
end
return { cancelled, room <= 0 and 1 or 0 }
