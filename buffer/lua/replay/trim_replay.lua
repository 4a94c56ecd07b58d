--- @include keys, replay
-- ARGV: lineage, most units, most bytes, least `born`, share of maxmemory, most to move in one call
-- -> {units forgotten, 1 if there may be more}   The oldest kept units go first; those of a batch stay.
local refused = refuse_learner(ARGV[1])
if refused then return refused end
local memory, room, forgotten = call('INFO', 'memory'), tonumber(ARGV[6]), 0
local used = tonumber(string.match(memory, 'used_memory:(%d+)'))
local limit = tonumber(string.match(memory, 'maxmemory:(%d+)')) * tonumber(ARGV[5])
local crowded = limit > 0 and used > limit -- read once: the next call sees what this one has freed
while forgotten < room do
  local oldest = call('ZRANGE', AGES, 0, 0, 'WITHSCORES')
  if not oldest[1] then return { forgotten, 0 } end
  local within = call('ZCARD', REPLAY) + call('ZCARD', REUSED) <= tonumber(ARGV[2])
    and tonumber(call('HGET', META, 'kept_bytes') or '0') <= tonumber(ARGV[3])
  if within and tonumber(oldest[2]) >= tonumber(ARGV[4]) and not crowded then return { forgotten, 0 } end
  forget_kept(oldest[1])
  forgotten = forgotten + 1
end
return { forgotten, 1 }
